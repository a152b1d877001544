"""What a wrong body is told, in OpenAI's words: one translator from msgspec's messages, and the refusals beside it."""

import re
from difflib import get_close_matches
from typing import Literal, get_args, get_origin

import msgspec

from toka.api.service import shown
from toka.errors import BadRequest, Unsupported

NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
"""What msgspec calls a type, and what people call it."""

MAX_DIGITS = 40
"""Of a client's whole numbers in a message; it says of longer ones no more than that."""

_TYPE = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_BOUND = re.compile(r"Expected `(int|float)` (<=|>=|<|>) (\S+)")
_LENGTH = re.compile(r"Expected `(str|array)` of length (<=|>=) (\d+)")
_ENUM = re.compile(r"Invalid enum value ")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]+)`")
_PATH = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_SURROGATE = re.compile(rb"\\u[dD][89abAB]", re.ASCII)


def invalid_json(body: bytes, error: Exception) -> BadRequest:
    """The body is no JSON. `error` is what the decoder said."""
    reason = str(error)
    if isinstance(error, RecursionError):
        reason = "it is nested too deeply"
    elif isinstance(error, msgspec.ValidationError):
        reason = "a number in it is out of range"
    elif not body.strip():
        reason = "it is empty"
    elif "truncated" in reason:
        # The decoder also says so of half a surrogate pair, for which there is no UTF-8.
        reason = f"it ends too early (byte {len(body)})"
        if _SURROGATE.search(body):
            reason += ", or a \\u escape in it is half a surrogate pair"
    else:
        reason = reason.removeprefix("JSON is malformed: ")
    return BadRequest(f"We could not parse the JSON body of your request: {reason}.")


def too_deep() -> BadRequest:
    """The body is JSON of more levels than can be looked into."""
    return BadRequest("The body of your request is nested too deeply.")


def not_an_object(value: object) -> BadRequest:
    """The body is JSON, but no object."""
    return BadRequest(f"Invalid type for the body: expected an object, but got {_name_of(value)} instead.")


def missing(param: str) -> BadRequest:
    """A field that must be there."""
    return BadRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def wrong_type(param: str, expected: str, value: object) -> BadRequest:
    """`expected` with its article: "a string or an array"."""
    message = f"Invalid type for '{param}': expected {expected}, but got {_name_of(value)} instead."
    return BadRequest(message, param=param, code="invalid_type")


def wrong_value(param: str, message: str) -> BadRequest:
    """A value of the right type that is none of those allowed. `message` says which are."""
    return BadRequest(f"Invalid value for '{param}': {message}", param=param, code="invalid_value")


def out_of_range(param: str, kind: str, sign: str, bound: object, value: object) -> BadRequest:
    """A number (`kind` is `integer` or `decimal`) that is not `sign bound`."""
    above = sign.startswith("<")
    side, code = ("above maximum", "above_max_value") if above else ("below minimum", "below_min_value")
    got = f", but got {number(value)} instead" if isinstance(value, int | float) else ""
    message = f"Invalid '{param}': {kind} {side} value. Expected a value {sign} {bound}{got}."
    return BadRequest(message, param=param, code=f"{kind}_{code}")


def number(value: float) -> str:
    """A client's number, or what was computed of it. JSON bounds no number, and Python spells no longer ones than it
    reads: one digit more is an error."""
    if isinstance(value, float) or abs(value) < 10**MAX_DIGITS:
        return str(value)
    return f"more than 10^{MAX_DIGITS}" if value > 0 else f"less than -10^{MAX_DIGITS}"


def empty(param: str, kind: str) -> BadRequest:
    """An `array` or a `string` without anything in it."""
    message = f"Invalid '{param}': empty {kind}. Expected at least one {'item' if kind == 'array' else 'character'}."
    return BadRequest(message, param=param, code=f"empty_{kind}")


def too_long(param: str, kind: str, most: str) -> BadRequest:
    """An `array` or a `string` of more than `most`."""
    message = f"Invalid '{param}': {kind} too long. Expected at most {most}."
    return BadRequest(message, param=param, code=f"{kind}_above_max_length")


def unknown(param: str, known: list[str], hint: str = "") -> BadRequest:
    """A field that nobody knows; the closest known one is offered."""
    name = shown(param)
    if not hint and (close := get_close_matches(_snake(name), known, 1, 0.75)):
        hint = f"Did you mean '{close[0]}'?"
    return BadRequest(f"Unknown parameter: '{name}'. {hint}".rstrip(), param=name, code="unknown_parameter")


def unsupported(param: str) -> Unsupported:
    """A field that is known and not served, set to something that asks for it."""
    return Unsupported(
        f"Unsupported parameter: '{param}' is not supported by this server with the value given. "
        "Leave it out, or set it to null.",
        param=param,
    )


def invalid(error: msgspec.ValidationError, body: object, struct: type[msgspec.Struct] | None = None) -> BadRequest:
    """What msgspec says of a body that was to be a `struct`, in OpenAI's words."""
    text = str(error)
    found = _PATH.search(text)
    path = found[1] if found else ""
    value = _at(body, path)
    if match := _MISSING.match(text):
        return missing(f"{path}.{match[1]}" if path else match[1])
    if match := _UNKNOWN.match(text):
        return unknown(f"{path}.{match[1]}" if path else match[1], [])
    if _ENUM.match(text) and struct is not None and (choices := _choices(struct, path)):
        return wrong_value(path, f"supported values are {', '.join(map(repr, choices))}.")
    if match := _TYPE.match(text):
        wanted = [NAMES.get(name, name) for name in match[1].split(" | ") if name != "null"]
        return wrong_type(path, " or ".join(wanted), value)
    if match := _BOUND.match(text):
        bound = match[3].removesuffix(".0")
        return out_of_range(path, "integer" if match[1] == "int" else "decimal", match[2], bound, value)
    if match := _LENGTH.match(text):
        kind = "string" if match[1] == "str" else "array"
        if match[2] == ">=":
            return empty(path, kind)
        return too_long(path, kind, match[3])
    return BadRequest(f"Invalid value for '{path}'.", param=path or None, code="invalid_value")


def _choices(struct: type[msgspec.Struct], name: str) -> tuple[object, ...]:
    """The values that a field takes, if they are few enough for its type to list them."""
    kinds = [field.type for field in msgspec.structs.fields(struct) if field.name == name]
    kinds += [one for kind in kinds for one in get_args(kind)]  # of a union
    return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())


def _name_of(value: object) -> str:
    """What kind of JSON value this is, with its article. Never the value itself: it may be a prompt."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a decimal number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def _at(body: object, path: str) -> object:
    """The value at msgspec's path; None if the path leads nowhere."""
    for key, index in _STEP.findall(path):
        if index and isinstance(body, list) and int(index) < len(body):
            body = body[int(index)]
        elif key and isinstance(body, dict):
            body = body.get(key)
        else:
            return None
    return body


def _snake(name: str) -> str:
    """`topK`, `top-k` and `Top_K` as `top_k`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
