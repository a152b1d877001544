"""What a load generator asks for: requests as pure functions of a seed (numpy's PCG64), prompts as token ids.

Ids need no tokenizer and reach the model as they are, so that lengths are exact. `random`, `prefix_repetition` and
`custom` are vLLM's data sets and take its options, `generated-shared-prefix` is SGLang's; `sharegpt-like` has the
lengths of ShareGPT's conversations, made up (log-normal), and `monkeys` is the load of Large Language Monkeys (Brown et
al. 2024, arXiv:2407.21787): one few-shot prefix, many questions, many samples of each.
"""

import math
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from bench.target import Count, Target
from toka.errors import ConfigError

Name = Literal[
    "random",
    "random-ids",
    "sharegpt-like",
    "generated-shared-prefix",
    "prefix_repetition",
    "monkeys",
    "custom",
]


class Request(NamedTuple):
    """One request of a data set."""

    prompt: list[int] | str
    output_len: int
    """Tokens of each choice at most; all of them where the end of text is ignored."""
    n: int = 1


class Ids(NamedTuple):
    """Token ids that prompts are made of: from `low` to below `high`."""

    low: int = 1000
    high: int = 120_000

    @classmethod
    def of(cls, vocab_size: int) -> "Ids":
        """Those that a vocabulary has: without the first ones and the last, which are special in many."""
        return cls(min(1000, vocab_size // 4), min(120_000, vocab_size))

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        """So many of them."""
        drawn: list[int] = generator.integers(self.low, self.high, count).tolist()
        return drawn


class Workload(Target, frozen=True, kw_only=True):
    """A target and a data set."""

    dataset_name: Annotated[Name, Meta(description="what to ask")] = "random"
    dataset_path: Annotated[str | None, Meta(description="the file of custom, JSON lines")] = None
    num_prompts: Annotated[
        Count | None,
        Meta(
            description="requests; default: 1000, or 2000 of sharegpt-like, 128 of monkeys, all rows of custom,"
            " groups x prompts of generated-shared-prefix",
        ),
    ] = None
    seed: Annotated[int, Meta(ge=0, description="of the data set and of the arrivals")] = 0
    input_len: Annotated[
        Count | None,
        Meta(description="tokens of a prompt, or of its part behind a prefix; not of every data set"),
    ] = None
    output_len: Annotated[Count | None, Meta(description="tokens of an answer: for any data set")] = None
    random_input_len: Annotated[Count, Meta(description="random: tokens of a prompt")] = 1024
    random_output_len: Annotated[Count, Meta(description="random: tokens of an answer")] = 128
    random_range_ratio: Annotated[
        float, Meta(ge=0, lt=1, description="random: lengths lie from (1 - r) to (1 + r) of what was asked")
    ] = 0.0
    random_prefix_len: Annotated[int, Meta(ge=0, description="random: tokens that all prompts begin with")] = 0
    prefix_repetition_prefix_len: Annotated[Count, Meta(description="prefix_repetition: tokens of a prefix")] = 256
    prefix_repetition_suffix_len: Annotated[Count, Meta(description="prefix_repetition: tokens after it")] = 256
    prefix_repetition_num_prefixes: Annotated[Count, Meta(description="prefix_repetition: prefixes")] = 10
    prefix_repetition_output_len: Annotated[Count, Meta(description="prefix_repetition: tokens of an answer")] = 128
    gsp_num_groups: Annotated[Count, Meta(description="generated-shared-prefix: system prompts")] = 64
    gsp_prompts_per_group: Annotated[Count, Meta(description="generated-shared-prefix: questions of each")] = 16
    gsp_system_prompt_len: Annotated[Count, Meta(description="generated-shared-prefix: tokens of a system prompt")] = (
        2048
    )
    gsp_question_len: Annotated[Count, Meta(description="generated-shared-prefix: tokens of a question")] = 128
    gsp_output_len: Annotated[Count, Meta(description="generated-shared-prefix: tokens of an answer")] = 256
    gsp_range_ratio: Annotated[
        float, Meta(gt=0, le=1, description="generated-shared-prefix: lengths lie from this share of what was asked")
    ] = 1.0
    gsp_ordered: Annotated[bool, Meta(description="generated-shared-prefix: group after group, not shuffled")] = False
    monkeys_prefix_len: Annotated[Count, Meta(description="monkeys: tokens that all prompts begin with")] = 1024
    monkeys_question_len: Annotated[Count, Meta(description="monkeys: tokens of a question")] = 96
    monkeys_output_len: Annotated[Count, Meta(description="monkeys: tokens of a sample")] = 200
    custom_output_len: Annotated[
        int, Meta(ge=-1, description="custom: tokens of an answer; -1: each row's output_tokens")
    ] = 256
    no_oversample: Annotated[bool, Meta(description="custom: do not repeat rows to reach num_prompts")] = False
    disable_shuffle: Annotated[bool, Meta(description="custom, prefix_repetition: keep the order")] = False

    def requests(self, ids: Ids) -> list[Request]:
        """The data set. Raises ConfigError for one that cannot be."""
        if self.input_len is not None and self.dataset_name in ("sharegpt-like", "custom"):
            raise ConfigError(f"input_len={self.input_len}: {self.dataset_name} has lengths of its own")
        made = self._made(ids)
        return made if self.n is None else [one._replace(n=self.n) for one in made]

    def _made(self, ids: Ids) -> list[Request]:
        count = self.num_prompts
        match self.dataset_name:
            case "random" | "random-ids":
                return random_ids(
                    count or 1000,
                    self.seed,
                    ids,
                    input_len=self.input_len or self.random_input_len,
                    output_len=self.output_len or self.random_output_len,
                    range_ratio=self.random_range_ratio,
                    prefix_len=self.random_prefix_len,
                )
            case "sharegpt-like":
                made = sharegpt_like(count or 2000, self.seed, ids)
                length = self.output_len
                return made if length is None else [one._replace(output_len=length) for one in made]
            case "generated-shared-prefix":
                if count is not None:
                    raise ConfigError(
                        f"num_prompts={count}: generated-shared-prefix has gsp_num_groups x gsp_prompts_per_group"
                    )
                return generated_shared_prefix(
                    self.seed,
                    ids,
                    groups=self.gsp_num_groups,
                    per_group=self.gsp_prompts_per_group,
                    system_len=self.gsp_system_prompt_len,
                    question_len=self.input_len or self.gsp_question_len,
                    output_len=self.output_len or self.gsp_output_len,
                    range_ratio=self.gsp_range_ratio,
                    ordered=self.gsp_ordered,
                )
            case "prefix_repetition":
                return prefix_repetition(
                    count or 1000,
                    self.seed,
                    ids,
                    prefixes=self.prefix_repetition_num_prefixes,
                    prefix_len=self.prefix_repetition_prefix_len,
                    suffix_len=self.input_len or self.prefix_repetition_suffix_len,
                    output_len=self.output_len or self.prefix_repetition_output_len,
                    shuffled=not self.disable_shuffle,
                )
            case "monkeys":
                return monkeys(
                    count or 128,
                    self.seed,
                    ids,
                    prefix_len=self.monkeys_prefix_len,
                    question_len=self.input_len or self.monkeys_question_len,
                    output_len=self.output_len or self.monkeys_output_len,
                )
            case "custom":
                if self.dataset_path is None:
                    raise ConfigError("dataset_path=… is missing: custom reads its requests from a file of JSON lines")
                return custom(
                    Path(self.dataset_path),
                    count,
                    self.seed,
                    output_len=self.output_len or (None if self.custom_output_len < 0 else self.custom_output_len),
                    oversample=not self.no_oversample,
                    shuffled=not self.disable_shuffle,
                )


def random_ids(
    count: int,
    seed: int,
    ids: Ids,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
) -> list[Request]:
    """Prompts without anything in common but a prefix. Lengths are uniform over ⌊L(1 - r)⌋ … ⌈L(1 + r)⌉, at least 1;
    the prefix comes on top, as in vLLM."""
    generator = np.random.default_rng(seed)
    prefix = ids.draw(generator, prefix_len)

    def lengths(length: int) -> list[int]:
        low, high = math.floor(length * (1 - range_ratio)), math.ceil(length * (1 + range_ratio))
        drawn: list[int] = generator.integers(max(low, 1), high + 1, count).tolist()
        return drawn

    inputs, outputs = lengths(input_len), lengths(output_len)
    return [Request(prefix + ids.draw(generator, i), o) for i, o in zip(inputs, outputs, strict=True)]


def sharegpt_like(count: int = 2000, seed: int = 0, ids: Ids = Ids()) -> list[Request]:  # noqa: B008 - a tuple
    """Lengths as in ShareGPT: log-normal, about 220 tokens in and 200 out on average, no shared prefixes.

    Synthetic: the parameters are (mean, sigma) = (230, 1.2) of prompts, clipped to 4 … 2048, and (205, 0.9) of answers,
    clipped to 4 … 1024.
    """
    generator = np.random.default_rng(seed)
    inputs = _lognormal(generator, 230, 1.2, count, 4, 2048)
    outputs = _lognormal(generator, 205, 0.9, count, 4, 1024)
    return [Request(ids.draw(generator, i), o) for i, o in zip(inputs, outputs, strict=True)]


def _lognormal(generator: np.random.Generator, mean: float, sigma: float, count: int, low: int, high: int) -> list[int]:
    """Whole numbers, log-normal with this mean before they are clipped."""
    drawn: npt.NDArray[np.float64] = generator.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count)
    clipped: list[int] = np.clip(np.rint(drawn), low, high).astype(int).tolist()
    return clipped


def monkeys(
    count: int = 128,
    seed: int = 0,
    ids: Ids = Ids(),  # noqa: B008 - a tuple
    *,
    n: int = 64,
    prefix_len: int = 1024,
    question_len: int = 96,
    output_len: int = 200,
) -> list[Request]:
    """One prefix for all prompts, a question of its own for each, and `n` samples of each."""
    generator = np.random.default_rng(seed)
    prefix = ids.draw(generator, prefix_len)
    return [Request(prefix + ids.draw(generator, question_len), output_len, n) for _ in range(count)]


def generated_shared_prefix(
    seed: int,
    ids: Ids,
    *,
    groups: int = 64,
    per_group: int = 16,
    system_len: int = 2048,
    question_len: int = 128,
    output_len: int = 256,
    range_ratio: float = 1.0,
    ordered: bool = False,
) -> list[Request]:
    """Groups of requests with a system prompt in common. Lengths are uniform over ⌊L · r⌋ … L, at least 1, as in
    SGLang."""
    generator = np.random.default_rng(seed)

    def lengths(length: int, many: int) -> list[int]:
        drawn: list[int] = generator.integers(max(int(length * range_ratio), 1), length + 1, many).tolist()
        return drawn

    many = groups * per_group
    systems = [ids.draw(generator, length) for length in lengths(system_len, groups)]
    questions, outputs = lengths(question_len, many), lengths(output_len, many)
    made = [
        Request(systems[number // per_group] + ids.draw(generator, question), output)
        for number, (question, output) in enumerate(zip(questions, outputs, strict=True))
    ]
    return made if ordered else [made[index] for index in generator.permutation(many).tolist()]


def prefix_repetition(
    count: int,
    seed: int,
    ids: Ids,
    *,
    prefixes: int = 10,
    prefix_len: int = 256,
    suffix_len: int = 256,
    output_len: int = 128,
    shuffled: bool = True,
) -> list[Request]:
    """So many prefixes, each for `count // prefixes` prompts, as in vLLM. Raises ConfigError for more prefixes than
    prompts."""
    if count < prefixes:
        raise ConfigError(
            f"num_prompts={count}: prefix_repetition has {prefixes} prefixes, and needs a prompt for each"
        )
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(prefixes):
        prefix = ids.draw(generator, prefix_len)
        made += [Request(prefix + ids.draw(generator, suffix_len), output_len) for _ in range(count // prefixes)]
    return [made[index] for index in generator.permutation(len(made)).tolist()] if shuffled else made


class Row(Struct, frozen=True):
    """A line of a custom data set."""

    prompt: str | list[int]
    """A text, or token ids."""
    output_tokens: int | None = None
    n: int = 1


def custom(
    path: Path,
    count: int | None,
    seed: int,
    *,
    output_len: int | None = 256,
    oversample: bool = True,
    shuffled: bool = True,
) -> list[Request]:
    """The rows of a file of JSON lines, repeated or cut to `count`. Without `output_len` each row has its own.

    Raises ConfigError, with the line, for what is no such file.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"dataset_path={path}: {error.strerror or error}") from None
    made: list[Request] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=Row)
        except msgspec.DecodeError as error:
            raise ConfigError(f"dataset_path={path}, line {number}: {error}") from None
        tokens = row.output_tokens if output_len is None else output_len
        if tokens is None:
            raise ConfigError(f"dataset_path={path}, line {number}: output_tokens is missing, and custom_output_len=-1")
        made.append(Request(row.prompt, tokens, row.n))
    if not made:
        raise ConfigError(f"dataset_path={path}: there is no request in it")
    generator = np.random.default_rng(seed)
    if shuffled:
        made = [made[index] for index in generator.permutation(len(made)).tolist()]
    if count is None:
        return made
    if oversample and count > len(made):
        made += [made[index] for index in generator.integers(0, len(made), count - len(made)).tolist()]
    return made[:count]
