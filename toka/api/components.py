"""JSON schemas of all bodies: what the structs say, and what the server checks besides."""

from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, Struct, UnsetType

from toka.api.fields import CHAT, COMPLETION, IGNORED, Schema
from toka.api.messages import ROLES, UNSERVED
from toka.api.sampling import MAX_BIAS
from toka.api.schemas import MAX_IDS, ChatBody, CompletionBody
from toka.api.service import Service
from toka.api.tokenize import DetokenizeBody, TokenizeBody
from toka.api.variables import EFFORT, RESERVED, SWITCHES

Json = dict[str, Any]

REFS = "#/components/schemas/"
ANYTHING: Json = {"description": "any JSON value"}
"""What `object` says, the one type that msgspec has no schema for."""
NULL: Json = {"type": "null"}
STRING: Json = {"type": "string"}
TEXT: Json = {"type": "string", "minLength": 1}

BODIES: dict[type[Struct], Schema[Any] | None] = {
    ChatBody: CHAT,
    CompletionBody: COMPLETION,
    TokenizeBody: None,
    DetokenizeBody: None,
}
"""What requests hold, with the fields that are known besides the struct's own."""


def ref(struct: type[Struct]) -> Json:
    """A component, by its name."""
    return {"$ref": REFS + struct.__name__}


def array(items: Json, least: int = 0) -> Json:
    """At least so many of a kind."""
    return {"type": "array", "items": items} | ({"minItems": least} if least else {})


def record(**fields: Json) -> Json:
    """An object that has these fields, among others."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def either(*kinds: Json) -> Json:
    """One of several."""
    return {"anyOf": list(kinds)}


PART = either(
    STRING,
    record(type={"const": "text"}, text=STRING),
    record(type={"const": "refusal"}, refusal=STRING),
)
CALL = record(function=record(name=STRING))
ASSISTANT: Json = {"const": "assistant"}
MESSAGE: Json = record(role={"enum": list(ROLES)})
MESSAGE["properties"] |= {
    "content": either(STRING, array(PART), NULL),
    "name": either(STRING, NULL),
    "tool_calls": either(array(CALL), NULL),
    **dict.fromkeys(UNSERVED, NULL),
}
MESSAGE["anyOf"] = [
    record(content={"type": ["string", "array"]}),
    record(role=ASSISTANT, tool_calls={"type": "array", "minItems": 1}),
    record(role=ASSISTANT, refusal={"not": NULL}),
]
"""What `messages.py` lets pass. Fields that only a template can know are passed on to it."""


NO_TOOLS: Json = either(
    {"properties": {"tools": either({"type": "array", "maxItems": 0}, NULL)}},
    record(tool_choice={"const": "none"}),
)
"""Tools may only be given where the model is not to call any."""


def components(service: Service, answers: Iterable[type[Struct]]) -> Json:
    """A schema for each kind of body, by the name of its struct; `answers` are those that only go out."""
    _, found = msgspec.json.schema_components(BODIES, schema_hook=lambda _: ANYTHING, ref_template=REFS + "{name}")
    for body, schema in BODIES.items():
        component = found[body.__name__]
        component["additionalProperties"] = False
        fields = component["properties"]
        for name, field in fields.items():
            exact = by_hand(service, body).get(name, field)
            bound(exact, bounds(service).get(name, {}))
            fields[name] = exact if name in component.get("required", ()) else nullable(exact)
        if schema is not None:
            fields |= beside(schema)
    found[ChatBody.__name__] |= NO_TOOLS
    found[TokenizeBody.__name__] |= either(record(prompt=STRING), record(messages={"type": "array"}))
    return found | told(answers) | {"Message": MESSAGE}


def told(answers: Iterable[type[Struct]]) -> Json:
    """Schemas of answers and of all that they hold. No field is left out but those that are unset.

    msgspec's own would do if it took a union of structs, which no decoder could tell apart.
    """
    found: Json = {}
    waiting = [*answers]
    while waiting:
        struct = waiting.pop()
        fields = msgspec.structs.fields(struct)
        found[struct.__name__] = {
            "title": struct.__name__,
            "description": " ".join((struct.__doc__ or "").split()),
            "type": "object",
            "properties": {field.encode_name: outgoing(field.type, waiting) for field in fields},
            "required": [field.encode_name for field in fields if field.default is not UNSET],
        }
        waiting = [one for one in waiting if one.__name__ not in found]
    return found


def outgoing(kind: Any, waiting: list[type[Struct]]) -> Json:
    """The schema of a field's type; structs in it are named, and added to `waiting`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        kinds = [outgoing(one, waiting) for one in inner if one is not UnsetType]
        return kinds[0] if len(kinds) == 1 else either(*kinds)
    if origin is list:
        return array(outgoing(inner[0], waiting))
    if origin is dict:
        return {"type": "object", "additionalProperties": outgoing(inner[1], waiting)}
    if isinstance(kind, type) and issubclass(kind, Struct):
        waiting.append(kind)
        return ref(kind)
    return NULL if kind is NoneType else msgspec.json.schema(kind)


def by_hand(service: Service, body: type[Struct]) -> Json:
    """Fields whose struct says less than the server checks."""
    id: Json = {"type": "integer"}
    exact = {
        "model": {"enum": list(service.names)},
        "messages": array({"$ref": f"{REFS}Message"}, 1),
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
            "maxProperties": MAX_IDS,
            "default": {},
        },
        "tool_choice": {"enum": ["none", "auto"], "default": "auto"},
        "chat_template_kwargs": {"type": "object", "propertyNames": {"not": {"enum": list(RESERVED)}}, "default": {}},
    }
    exact["truncate_prompt_tokens"] = either({"enum": [-1]}, {"type": "integer", "minimum": 1})
    known = frozenset[str]() if service.template is None else service.template.variables
    if not known & {EFFORT, *SWITCHES}:
        exact["reasoning_effort"] = NULL
    if not service.config.trust_request_chat_template:
        exact["chat_template"] = NULL
    if body is CompletionBody:
        exact["prompt"] = either(STRING, array(STRING, 1), array(id, 1), array(array(id, 1), 1))
    return exact


def bounds(service: Service) -> Json:
    """What the model and the options say of integers, by the field that holds them."""
    ids = {"minimum": 0, "maximum": service.tokenizer.vocab_size - 1}
    width = {"maximum": service.config.max_logprobs}
    return {
        "n": {"maximum": service.config.max_n},
        "best_of": {"maximum": service.config.max_n},
        **dict.fromkeys(("prompt", "tokens", "stop_token_ids", "allowed_token_ids"), ids),
        **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), width),
    }


def bound(schema: Json, limits: Json) -> None:
    """Narrow every integer in a schema."""
    if schema.get("type") == "integer":
        schema.update(limits)
    for inner in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())):
        bound(inner, limits)


def nullable(schema: Json) -> Json:
    """Null is absent."""
    if schema in ({}, NULL) or NULL in schema.get("anyOf", ()):
        return schema
    usual = {"default": schema.pop("default")} if "default" in schema else {}
    return either(schema, NULL) | usual


def beside(schema: Schema[Any]) -> Json:
    """Fields that are accepted without effect, those that are refused but for neutral values, and those that only
    null keeps from being unknown."""
    return (
        dict.fromkeys(schema.elsewhere, NULL)
        | {name: {"enum": [None, *allowed]} for name, allowed in schema.unserved.items()}
        | {name: {} for name in sorted(IGNORED)}
    )
