"""Whether prompts and the tokens asked for fit the context, in OpenAI's words."""

from collections.abc import Sequence
from typing import Literal

from toka.api import errors
from toka.api.schemas import GenerationBody
from toka.errors import ContextLengthExceeded, Unavailable

Overflow = Literal["error", "clamp"]

MAX_CHOICES = 16384
"""Prompts times samples of one request: to set so many up takes a tenth of a second, and everybody waits for it."""


def limit_of(body: GenerationBody) -> int | None:
    """New tokens that the client asked for."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def limit_name(body: GenerationBody) -> str:
    """The field that `limit_of` took it from."""
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def check_choices(prompts: int, n: int, best_of: int | None) -> None:
    """Several prompts may not have more than MAX_CHOICES samples, kept or not. Raises BadRequest."""
    name, each = ("n", n) if best_of is None or best_of == n else ("best_of", best_of)
    if prompts > 1 and prompts * each > MAX_CHOICES:
        samples = f" with {name} = {each}" if each > 1 else ""
        raise errors.too_long("prompt", "array", f"{max(1, MAX_CHOICES // each)} prompts{samples}")


def check_fewest(fewest: int, *, context: int, param: str) -> None:
    """Refuse, before it is tokenized, a text of at least `fewest` tokens that cannot fit.

    Raises ContextLengthExceeded, or Unavailable while the context is unknown.
    """
    _check_known(context)
    if fewest > context:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context} tokens. However, your {param} resulted in at least "
            f"{fewest} tokens. Please reduce the length of the {param}.",
            param=param,
        )


def kept(asked: int | None, *, context: int, answer: int) -> int | None:
    """Tokens of each prompt to keep at most, for a `truncate_prompt_tokens`; None: all of them.

    `answer` is how many new tokens there must be room for. Raises BadRequest for a number that cannot be, and
    Unavailable while the context is unknown.
    """
    if asked is None:
        return None
    _check_known(context)
    if asked == 0:
        raise errors.wrong_value("truncate_prompt_tokens", "expected -1, or at least one token to keep.")
    most = max(context - answer, 1)
    if asked > most:
        raise errors.out_of_range("truncate_prompt_tokens", "integer", "<=", most, asked)
    return most if asked == -1 else asked


def last(ids: list[int], count: int | None, front: int = 0) -> list[int]:
    """The last `count` ids, the first `front` ones among them; all for None."""
    if count is None or len(ids) <= count:
        return ids
    front = min(front, count)
    return ids[:front] + ids[len(ids) - count + front :]


def check_prompts(prompts: Sequence[Sequence[int]], *, context: int, param: str, new: int = 1) -> None:
    """Every prompt must fit with at least `new` tokens after it.

    `context` is the longest prompt + answer in tokens, 0 while nobody knows. `param` is the field of the prompts.
    Raises ContextLengthExceeded, or Unavailable while the context is unknown.
    """
    _check_known(context)
    longest = max(map(len, prompts))
    if longest + new > context:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context} tokens. However, your {param} resulted in "
            f"{longest} tokens{', and an answer needs at least one more' if longest <= context else ''}. "
            f"Please reduce the length of the {param}.",
            param=param,
        )


def fit(
    asked: int,
    prompts: Sequence[Sequence[int]],
    *,
    context: int,
    param: str,
    overflow: Overflow,
    name: str = "max_tokens",
) -> int:
    """`max_tokens` for prompts that `check_prompts` let pass.

    With `overflow="error"` raises ContextLengthExceeded, which says the largest value that fits every prompt. With
    `clamp` each prompt gets what fits it: the engine knows.
    """
    longest = max(map(len, prompts))
    if longest + asked <= context or overflow == "clamp":
        return asked
    place = "messages" if param == "messages" else "prompt"
    total = errors.number(longest + asked)
    raise ContextLengthExceeded(
        f"This model's maximum context length is {context} tokens. However, you requested {total} tokens "
        f"({longest} in the {place}, {errors.number(asked)} in the completion). Use {name} ≤ {context - longest}.",
        param=param,
    )


def _check_known(context: int) -> None:
    if context <= 0:
        raise Unavailable("The model is still loading. Try again in a moment.")
