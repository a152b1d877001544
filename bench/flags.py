"""Command lines as people write them for vLLM's and SGLang's benchmarks, besides toka's `key=value`.

A switch may stand alone (`--ignore-eos`), an option may have several values (`--goodput ttft:200 tpot:50`), and a
number may be `inf`. Options of those programs that are not carried are refused with what to do instead.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct, inspect

from toka.errors import ConfigError
from toka.options import Given, build, from_words, options

S = TypeVar("S", bound=Struct)

TOKEN_IDS = "prompts are sent as token ids, so no tokenizer is needed here"
SIZES = "give dataset_name and its lengths"
NOT_HERE = "that belongs to vLLM's own process"

REFUSED: Mapping[str, str] = {
    "tokenizer": TOKEN_IDS,
    "tokenizer_mode": TOKEN_IDS,
    "trust_remote_code": TOKEN_IDS,
    "skip_chat_template": TOKEN_IDS + "; texts of custom are sent as they are",
    "apply_chat_template": "take backend=openai-chat with dataset_name=custom",
    "tokenize_prompt": "that is how it always is",
    "served_model_name": "give the name as model=…",
    "use_beam_search": "beam search is not served",
    "profile": "start the server under a profiler",
    "ready_check": "ready_check_timeout_sec=SECONDS waits for the server",
    "lora_modules": "adapters are not served",
    "lora_name": "adapters are not served",
    "lora_path": "adapters are not served",
    "hf_name": "take dataset_name=custom with a file of prompts",
    "hf_subset": "take dataset_name=custom with a file of prompts",
    "hf_split": "take dataset_name=custom with a file of prompts",
    "hf_output_len": "take dataset_name=custom with a file of prompts",
    "sharegpt_output_len": "output_len=TOKENS with dataset_name=sharegpt-like",
    "random_batch_size": "embeddings are not served",
    "max_concurrent_requests": "max_concurrency=REQUESTS",
    "plot_timeline": "save_detailed=T keeps the figures of every request",
    "plot_dataset_stats": "save_detailed=T keeps the figures of every request",
    "self_timed": "traces are not carried: request_rate and burstiness time the requests",
    "probe_request_rate": "request_rate=RATE",
    "disable_ignore_eos": "ignore_eos=F, which is how bench/serve.py begins",
    "disable_stream": "python bench/throughput.py does not stream",
    "extra_request_body": "extra_body=JSON",
    "output_file": "save_result=T with result_filename, or output_json=FILE of bench/throughput.py",
    "output_details": "save_detailed=T",
    "warmup_requests": "num_warmups=REQUESTS",
    "flush_cache": "another seed has other prompts",
    "cache_report": "the server's own figures are not read",
    "gsp_num_turns": "conversations of several turns are not carried",
    "lmcache": NOT_HERE,
    "async_engine": NOT_HERE,
    "disable_detokenize": NOT_HERE,
    "tensor_parallel_size": "give the server's options in serve='…'",
    "max_model_len": "give the server's options in serve='max_model_len=…'",
    "load_format": "give the server's options in serve='load_format=…'",
    "dtype": "give the server's options in serve='dtype=…'",
    "num_iters_profile": "num_iters=ITERATIONS",
}
"""Options of those programs that are not carried, and what to do instead."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "dataset_name": {
        "sharegpt": "the file needs a tokenizer here; sharegpt-like has its lengths, or take custom with token ids",
        "hf": "take custom with a file of prompts",
        "burstgpt": "take burstiness=… with random or sharegpt-like",
        "spec_bench": "take custom with a file of prompts",
        "timed_trace": "arrivals follow request_rate, burstiness and ramp_up_strategy",
        "mooncake": "arrivals follow request_rate, burstiness and ramp_up_strategy",
    },
    "backend": {
        "sglang": "openai speaks to any server with /v1/completions",
        "sglang-oai": "openai speaks to any server with /v1/completions",
        "sglang-oai-chat": "openai-chat speaks to any server with /v1/chat/completions",
        "vllm-chat": "openai-chat speaks to any server with /v1/chat/completions",
        "openai-embeddings": "embeddings are not served",
        "hf": "bench/decode.py compares with transformers",
    },
}
"""The same for values."""

SWITCH = {"t", "f", "true", "false"}


def parse(struct: type[S], words: Sequence[str], several: frozenset[str] = frozenset()) -> S:
    """The options that these words are. Those in `several` take values up to the next option, joined by spaces.

    Raises ConfigError, one line, for what is no option and for values that cannot be.
    """
    known = options(struct)
    given = from_words(list(_joined(words, {name: option.plain for name, option in known.items()}, several)))
    for name, one in given.items():
        if name not in known and name in REFUSED:
            raise ConfigError(f"{one.shown}: {name} is not carried here: {REFUSED[name]}")
        if hint := VALUES.get(name, {}).get(str(one.value)):
            raise ConfigError(f"{one.shown}: not carried here: {hint}")
        if name in known and one.value == "inf" and isinstance(known[name].plain, inspect.FloatType):
            given[name] = Given(math.inf, one.shown)
    return build(struct, given)


def _joined(words: Sequence[str], known: Mapping[str, inspect.Type], several: frozenset[str]) -> Iterator[str]:
    """The same words, each option with its value: `--key value` becomes `key=value`."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if not word.startswith("--") and name not in several:
            yield word
        elif isinstance(known.get(name), inspect.BoolType) and "=" not in word:
            yield f"{name}={rest.pop(0) if rest and rest[0].lower() in SWITCH else 'T'}"
        elif name in several:
            values = [word.partition("=")[2]] if "=" in word else []
            while rest and not _begins_option(rest[0], known):
                values.append(rest.pop(0))
            yield f"{name}={' '.join(values)}"
        elif name in REFUSED and "=" not in word and (not rest or _begins_option(rest[0], known)):
            yield f"{name}=T"  # a switch, to be refused by its name
        else:
            yield word
            if "=" not in word and rest:
                yield rest.pop(0)


def _begins_option(word: str, known: Mapping[str, inspect.Type]) -> bool:
    return word.startswith("--") or ("=" in word and word.partition("=")[0].replace("-", "_") in known)
