"""The bodies of requests and answers, as msgspec Structs. A field of a request that is not here is in `fields.py`."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from toka.request import MAX_PRIORITY

MAX_STOPS = 16
"""OpenAI allows 4; evaluation harnesses forward every `until` they have."""
MAX_IDS = 1024
"""Token ids in `stop_token_ids`, `allowed_token_ids` and `logit_bias`."""

MAX_STOP_CHARS = 1024
"""Far beyond any use; looking for a stop string takes memory in proportion to it."""

Natural = Annotated[int, Meta(ge=0)]
Natural32 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Priority = Annotated[int, Meta(ge=-(2**31), le=MAX_PRIORITY)]
FinishReason = Annotated[str, Meta(extra_json_schema={"enum": ["stop", "length"]})]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


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
    stream_interval: Annotated[int, Meta(ge=1)] | None = None
    """Tokens of a choice in each chunk of a stream, at least. Its first text and its end come at once."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    """False: special tokens are spelled in the text, and stop strings may match them."""
    spaces_between_special_tokens: bool = True
    """False asks for nothing of byte-level tokenizers, which put none there; of others that do it is refused."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Keep only so many tokens of each prompt, the last ones; -1: as many as leave room for the answer."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[str, object] = {}
    """Token ids, as strings, to what is added to their logits: -100 to 100."""
    min_tokens: Natural32 = 0
    """Tokens before which nothing ends a choice."""
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_IDS)] = []
    include_stop_str_in_output: bool = False
    allowed_token_ids: Annotated[list[int], Meta(min_length=1, max_length=MAX_IDS)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] = ""
    """Requests of different salts share no cached prefix."""
    priority: Priority = 0
    """Lower numbers start first."""
    prompt_logprobs: Natural32 | None = None
    """How many most probable tokens to report in the place of each prompt token, besides that token."""
    logprobs_format: Literal["lists", "packed"] = "lists"
    """`packed`: log-probabilities come as arrays in base64, without the tokens' names."""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Name tokens `token_id:N` in log-probabilities."""
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """Seconds after which the request is given up with a 408."""


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, object]], Meta(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    """Whatever the template knows."""
    reasoning_effort: Effort | None = None
    """Refused where the template has no variable for it."""
    chat_template: str | None = None
    """In place of the model's, if the server is told to trust requests with that."""
    logprobs: bool = False
    top_logprobs: Natural32 | None = None
    """Needs `logprobs`."""
    tools: list[dict[str, object]] = []
    tool_choice: str | dict[str, object] = "auto"


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    """A text, token ids, or a list of one of them; not mixed, which the schema cannot say."""
    logprobs: Natural32 | None = None
    """Report the log-probability of each token, and this many most probable ones."""
    echo: bool = False
    """The prompt comes before its completion."""


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of a request: each prompt once, whatever n is; of each choice all that were sampled."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct, frozen=True):
    """A token that might have been sampled. `bytes` is null for one that stands for no text."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct, frozen=True):
    """A token that was sampled."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(Struct, frozen=True):
    """Four lists of one length. Of the first token of an echoed prompt there is no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """In characters of the choice's text."""


class Array(Struct, frozen=True):
    """Numbers. In JSON `data` is the base64 of their little-endian bytes, row by row."""

    dtype: Literal["int32", "float32"]
    shape: list[int]
    data: bytes | bytearray


class PackedLogprobs(Struct, frozen=True):
    """What `logprobs_format: "packed"` has instead of lists, a row for each of n tokens. Before the first token of a
    prompt there is nothing that could tell of it: its log-probabilities are NaN, its ids −1, its rank 0."""

    token_ids: Array
    """int32[n]: the tokens."""
    token_logprobs: Array
    """float32[n]: theirs."""
    top_ids: Array
    """int32[n, k]: the most probable tokens in the place of each, in falling order."""
    top_logprobs: Array
    """float32[n, k]: theirs."""
    ranks: Array | UnsetType = UNSET
    """int32[n]: places of the tokens themselves among all, from 1. Of prompts only."""


class PromptLogprob(Struct, frozen=True):
    """vLLM's: `rank` is the token's place among all, from 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each prompt token, by id: itself and the most probable ones in its place; null for the first."""


class ChatMessage(Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: ChatLogprobs | PackedLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class TextChoice(Struct, frozen=True):
    index: int
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: TextLogprobs | PackedLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | PackedLogprobs | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | PackedLogprobs | UnsetType = UNSET


class TextCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model in /v1/models. `root` and `max_model_len` are vLLM's; routers read them."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "toka"
    root: str
    max_model_len: int | None


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ChatDelta(Struct, frozen=True):
    """The role in a choice's first chunk, nothing in its last."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | PackedLogprobs | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextChunkChoice(Struct, frozen=True):
    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: TextLogprobs | PackedLogprobs | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Chunk(Struct, frozen=True, kw_only=True):
    """An event of a stream, as `chunks.py` writes it. The one with the usage has no choices."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET


class ChatCompletionChunk(Chunk, frozen=True, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextCompletionChunk(Chunk, frozen=True, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChunkChoice]


class Refusal(Struct, frozen=True):
    """`code` is for programs, `param` the path of what is wrong, `message` for people."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    """The body of everything but a 200."""

    error: Refusal
