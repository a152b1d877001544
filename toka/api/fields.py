"""A body's fields, name by name: served, without effect, known but not served, unknown. And how a body is parsed."""

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from toka.api import errors
from toka.api.schemas import ChatBody, CompletionBody, GenerationBody
from toka.errors import BadRequest

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T", bound=GenerationBody)

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Accepted with any value and without effect. Nothing is ever stored."""

UNSERVED: dict[str, tuple[object, ...]] = {
    "bad_words": ([],),
    "custom_params": (),
    "detokenize": (True,),
    "ebnf": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "no_stop_trim": (False,),
    "regex": (),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "rid": (),
    "stop_regex": ([],),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Known to OpenAI's, vLLM's or SGLang's clients and not served: refused unless null or one of these neutral values."""

UNSERVED_CHAT: dict[str, tuple[object, ...]] = UNSERVED | {
    "echo": (False,),
    "add_special_tokens": (False,),
    "audio": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "moderation": (),
    "modalities": (["text"],),
    "prediction": (),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "thinking_token_budget": (),
    "web_search_options": (),
}

UNSERVED_COMPLETION: dict[str, tuple[object, ...]] = UNSERVED | {
    "add_special_tokens": (True,),
    "prompt_embeds": (),
    "suffix": ("",),
}

EXTRA_BODY = (
    "`extra_body` belongs to the OpenAI client's method, which merges it into the body; over HTTP, put its fields "
    "at the top level of the body."
)


def neutral(value: object, allowed: tuple[object, ...]) -> bool:
    """Whether a value asks for nothing. 0 and 0.0 are the same here, 0 and False are not."""
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in allowed)


class Schema(Generic[T]):
    """One endpoint's body: what it may hold, and how it becomes a Struct."""

    def __init__(self, struct: type[T], unserved: Mapping[str, tuple[object, ...]], elsewhere: dict[str, str]) -> None:
        """`elsewhere`: fields that people send here and that belong to another path."""
        self._struct = struct
        self._served = frozenset(struct.__struct_fields__)
        self.unserved = unserved
        self.elsewhere = elsewhere
        self._known = sorted({*self._served, *unserved, *IGNORED})

    def parse(self, body: bytes) -> T:
        """The body, checked field by field. Raises BadRequest."""
        return self.check(decode(body))

    def check(self, decoded: object) -> T:
        """The same for a body that has been decoded already, and for one of several in a body."""
        if not isinstance(decoded, dict):
            raise errors.not_an_object(decoded)
        fields: dict[str, object] = {}
        for name, value in decoded.items():
            if name in self._served:
                fields[name] = value
            else:
                self._check(name, value)
        return convert(fields, self._struct)

    def _check(self, name: str, value: object) -> None:
        """Refuse a field that is not served, unless it asks for nothing."""
        if name in IGNORED or (value is None and name in self.elsewhere):
            return
        allowed = self.unserved.get(name)
        if allowed is None:
            raise self._unknown(name)
        if value is not None and not neutral(value, allowed):
            raise errors.unsupported(name)

    def _unknown(self, name: str) -> BadRequest:
        hint = f"It belongs to {self.elsewhere[name]}." if name in self.elsewhere else ""
        return errors.unknown(name, self._known, EXTRA_BODY if name == "extra_body" else hint)


def decode(body: bytes) -> object:
    """JSON as Python's own types. Raises BadRequest."""
    try:
        decoded: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise errors.invalid_json(body, error) from None
    return decoded


def convert(decoded: object, struct: type[S]) -> S:
    """An object as a Struct; its nulls are absent. Raises BadRequest."""
    try:
        return _convert(decoded, struct)
    except RecursionError:
        raise errors.too_deep() from None


def _convert(decoded: object, struct: type[S]) -> S:
    if not isinstance(decoded, dict):
        raise errors.not_an_object(decoded)
    known = struct.__struct_fields__
    fields = {name: value for name, value in decoded.items() if value is not None or name not in known}
    try:
        return msgspec.convert(fields, struct)
    except msgspec.ValidationError:
        # JSON has one kind of number: 3.0 is an integer, wherever one is wanted.
        whole = {name: _whole(value) for name, value in fields.items()}
    try:
        return msgspec.convert(whole, struct)
    except msgspec.ValidationError as error:
        raise errors.invalid(error, decoded, struct) from None


def _whole(value: object) -> object:
    """Floats without a fraction as ints; lists through and through, objects as they are."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return value


CHAT_ONLY = ("messages", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "reasoning_effort")

CHAT = Schema(ChatBody, UNSERVED_CHAT, {"prompt": "/v1/completions", "suffix": "/v1/completions"})
COMPLETION = Schema(
    CompletionBody,
    UNSERVED_COMPLETION,
    dict.fromkeys(CHAT_ONLY, "/v1/chat/completions"),
)
