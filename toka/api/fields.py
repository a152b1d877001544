"""A body's fields, name by name: served, without effect, known but not served, unknown. And how a body is parsed."""

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from toka.api import errors
from toka.api.schemas import ChatBody, CompletionBody, GenerationBody
from toka.errors import BadRequest

T = TypeVar("T", bound=GenerationBody)

IGNORED = frozenset(
    {
        "metadata",
        "moderation",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
        "verbosity",
    }
)
"""Accepted with any value and without effect. Nothing is ever stored."""

UNSERVED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "custom_params": (),
    "detokenize": (True,),
    "ebnf": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "lora_path": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "no_stop_trim": (False,),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_penalty": (1,),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "rid": (),
    "skip_special_tokens": (True,),
    "stop_regex": ([],),
    "stop_token_ids": ([],),
    "stream_interval": (1,),
    "structured_outputs": (),
    "timeout_s": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Known to OpenAI's, vLLM's or SGLang's clients and not served: refused unless null or one of these neutral values."""

UNSERVED_CHAT: dict[str, tuple[object, ...]] = UNSERVED | {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True,),
    "logprobs": (False,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "thinking_token_budget": (),
    "top_logprobs": (0,),
    "web_search_options": (),
}

UNSERVED_COMPLETION: dict[str, tuple[object, ...]] = UNSERVED | {
    "add_special_tokens": (True,),
    "logprobs": (),
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
        self._unserved = unserved
        self._elsewhere = elsewhere
        self._known = sorted({*self._served, *unserved, *IGNORED})

    def parse(self, body: bytes) -> T:
        """The body, checked field by field. Raises BadRequest."""
        try:
            decoded = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise errors.invalid_json(body, error) from None
        if not isinstance(decoded, dict):
            raise errors.not_an_object(decoded)
        fields: dict[str, object] = {}
        for name, value in decoded.items():
            if name not in self._served:
                self._check(name, value)
            elif value is not None:
                fields[name] = value
        try:
            return msgspec.convert(fields, self._struct)
        except msgspec.ValidationError:
            # JSON has one kind of number: 3.0 is an integer, wherever one is wanted.
            whole = {name: _whole(value) for name, value in fields.items()}
        try:
            return msgspec.convert(whole, self._struct)
        except msgspec.ValidationError as error:
            raise errors.invalid(error, decoded) from None

    def _check(self, name: str, value: object) -> None:
        """Refuse a field that is not served, unless it asks for nothing."""
        if name in IGNORED or (value is None and name in self._elsewhere):
            return
        allowed = self._unserved.get(name)
        if allowed is None:
            raise self._unknown(name)
        if value is not None and not neutral(value, allowed):
            raise errors.unsupported(name)

    def _unknown(self, name: str) -> BadRequest:
        hint = f"It belongs to {self._elsewhere[name]}." if name in self._elsewhere else ""
        return errors.unknown(name, self._known, EXTRA_BODY if name == "extra_body" else hint)


def _whole(value: object) -> object:
    """Floats without a fraction as ints; lists through and through, objects as they are."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return value


CHAT = Schema(ChatBody, UNSERVED_CHAT, {"prompt": "/v1/completions", "suffix": "/v1/completions"})
COMPLETION = Schema(
    CompletionBody,
    UNSERVED_COMPLETION,
    dict.fromkeys(("messages", "tools", "tool_choice", "chat_template_kwargs"), "/v1/chat/completions"),
)
