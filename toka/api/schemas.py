"""The bodies of requests and answers, as msgspec Structs. A field of a request that is not here is in `fields.py`."""

from typing import Annotated, Any

from msgspec import Meta, Struct

MAX_STOPS = 16
"""OpenAI allows 4; evaluation harnesses forward every `until` they have."""
MAX_STOP_CHARS = 1024
"""Far beyond any use; looking for a stop string takes memory in proportion to it."""

Natural = Annotated[int, Meta(ge=0)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream brings besides its text."""

    include_usage: bool | None = None
    """One more chunk at the end, with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """The usage so far on every chunk (vLLM's)."""
    include_obfuscation: bool | None = None
    """Accepted without effect: nothing here hides lengths."""


class GenerationBody(Struct, frozen=True, kw_only=True):
    """What both endpoints take. Fields that are null have been dropped before: null is absent."""

    model: str | None = None
    max_tokens: Natural | None = None
    max_completion_tokens: Natural | None = None
    """Wins over `max_tokens`."""
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """-1 and 0: off."""
    n: Annotated[int, Meta(ge=1)] = 1
    best_of: Annotated[int, Meta(ge=1)] | None = None
    """Served when it equals n, where it means nothing."""
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    seed: Int64 | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, object]], Meta(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    """Whatever the template knows."""
    tools: list[dict[str, object]] = []
    tool_choice: str | dict[str, object] = "auto"


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    """A text, token ids, or a list of one of them; not mixed, which the schema cannot say."""


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of a request: each prompt once, whatever n is; of each choice all that were sampled."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatMessage(Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: str
    stop_reason: str | None
    logprobs: None = None


class TextChoice(Struct, frozen=True):
    index: int
    text: str
    finish_reason: str
    stop_reason: str | None
    logprobs: None = None


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class TextCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model in /v1/models. `root` and `max_model_len` are vLLM's; routers read them."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "toka"
    root: str
    max_model_len: int | None


class ModelList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
