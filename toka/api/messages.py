"""A conversation as clients send it, checked, and as chat templates take it."""

from collections.abc import Mapping, Sequence

import msgspec

from toka.api import errors
from toka.api.service import ChatTemplate, shown
from toka.errors import BadRequest, Unsupported

Message = dict[str, object]

ROLES = ("system", "developer", "user", "assistant", "tool")
UNSERVED = ("audio", "function_call")
"""Fields of a message that no template here can render."""


def conversation(messages: Sequence[Mapping[str, object]], template: ChatTemplate, model: str) -> list[Message]:
    """The messages for a template: content a string, unless it takes parts; arguments of tool calls as objects.

    Null fields are dropped; fields that only a template can know are passed on. Raises BadRequest, in which `model` is
    the name of what cannot take a picture.
    """
    return [_message(one, f"messages[{index}]", template, model) for index, one in enumerate(messages)]


def _message(sent: Mapping[str, object], at: str, template: ChatTemplate, model: str) -> Message:
    message = {key: value for key, value in sent.items() if value is not None}
    for name in UNSERVED:
        if name in message:
            raise errors.unsupported(f"{at}.{name}")
    role = message.get("role")
    if role is None:
        raise errors.missing(f"{at}.role")
    if not isinstance(role, str):
        raise errors.wrong_type(f"{at}.role", "a string", role)
    if role not in ROLES:
        raise errors.wrong_value(f"{at}.role", f"expected one of {', '.join(ROLES)}.")
    if role == "developer" and "developer" not in template.source:
        message["role"] = "system"
    if "name" in message and not isinstance(message["name"], str):
        raise errors.wrong_type(f"{at}.name", "a string", message["name"])
    calls = message.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise errors.wrong_type(f"{at}.tool_calls", "an array", calls)
    if calls:
        message["tool_calls"] = [_call(one, f"{at}.tool_calls[{index}]") for index, one in enumerate(calls)]
    if "content" in message:
        message["content"] = _content(message["content"], f"{at}.content", template.takes_parts, model)
    elif role == "assistant" and (calls or "refusal" in message):
        message["content"] = ""
    else:
        raise errors.missing(f"{at}.content")
    return message


def _content(content: object, at: str, takes_parts: bool, model: str) -> str | list[Message]:
    """A string, or text parts: joined by newlines for a template that wants a string."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise errors.wrong_type(at, "a string or an array of content parts", content)
    texts = [_part(one, f"{at}[{index}]", model) for index, one in enumerate(content)]
    if takes_parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part(part: object, at: str, model: str) -> str:
    """The text of a content part; a refusal is text too."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise errors.wrong_type(at, "an object", part)
    kind = part.get("type")
    if kind is None:
        raise errors.missing(f"{at}.type")
    if kind not in ("text", "refusal"):
        name = shown(kind) if isinstance(kind, str) else "?"
        raise Unsupported(
            f"The model `{model}` takes text only: '{at}' is a content part of type '{name}'.",
            param=at,
            code="unsupported_content_part",
        )
    text = part.get(kind)
    if text is None:
        raise errors.missing(f"{at}.{kind}")
    if not isinstance(text, str):
        raise errors.wrong_type(f"{at}.{kind}", "a string", text)
    return text


def _call(call: object, at: str) -> Message:
    """A tool call of an assistant's message, its arguments parsed: templates want an object, clients send its JSON."""
    if not isinstance(call, dict):
        raise errors.wrong_type(at, "an object", call)
    function = call.get("function")
    if function is None:
        raise errors.missing(f"{at}.function")
    if not isinstance(function, dict):
        raise errors.wrong_type(f"{at}.function", "an object", function)
    if not isinstance(function.get("name"), str):
        raise errors.missing(f"{at}.function.name")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> object:
    """What is no JSON object stays as it was sent."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def check_continues(messages: Sequence[Mapping[str, object]]) -> None:
    """`continue_final_message` needs an assistant's message to go on with. Raises BadRequest."""
    if messages[-1]["role"] != "assistant":
        raise BadRequest(
            "'continue_final_message' needs a last message of role 'assistant'.",
            param="continue_final_message",
            code="invalid_value",
        )
