"""Chat messages to one string, by the jinja2 template that comes with a model."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from toka.errors import BadRequest, StartError
from toka.text.files import read_json, special_tokens

Message = Mapping[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a message's reasoning. Templates read the first, some the second."""
_MARK = "END_OF_THE_OPEN_MESSAGE "
"""Marks where an open message ends. Its space tells whether the template trims."""


class ChatTemplate:
    """Renders what transformers' `apply_chat_template(…, tokenize=False)` renders."""

    __slots__ = ("_for_tools", "_plain", "_special", "source", "takes_parts", "variables")

    def __init__(self, source: str, special: Mapping[str, str], for_tools: str | None = None) -> None:
        """`special` are the tokens that the template knows by name, `for_tools` a template for requests with tools.

        Raises jinja2.TemplateSyntaxError.
        """
        self.source = source
        self._special = dict(special)
        self._plain, self.variables = _compiled(source)
        """`variables`: names that the template reads and does not set itself."""
        self._for_tools = _compiled(for_tools)[0] if for_tools is not None else self._plain
        self.takes_parts = self._probe_parts()
        """The template goes through the parts of a content that is a list; otherwise content must be a string."""

    def __repr__(self) -> str:
        return f"<ChatTemplate {len(self.source)} characters, takes_parts={self.takes_parts}>"

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """The template of a model folder; None if it has none. Raises StartError if it is broken."""
        sources = _sources(folder)
        if not sources:
            return None
        if "default" not in sources:
            raise StartError(
                f"{folder} has chat templates named {', '.join(sorted(sources))} and none named default;"
                " save the one to use as chat_template.jinja"
            )
        try:
            return cls(sources["default"], special_tokens(folder), sources.get("tool_use"))
        except jinja2.TemplateSyntaxError as error:
            raise StartError(
                f"the chat template of {folder} is broken: {_line(error)} (line {error.lineno}); mend or remove it"
            ) from None

    def other(self, source: str) -> Self:
        """A template with the same tokens by name. Raises BadRequest if `source` is broken."""
        try:
            return type(self)(source, self._special)
        except jinja2.TemplateSyntaxError as error:
            raise BadRequest(
                f"Invalid 'chat_template': {_line(error)} (line {error.lineno}).",
                param="chat_template",
                code="invalid_value",
            ) from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: object,
    ) -> str:
        """The prompt for `messages`. It brings its own special tokens: encode it without adding any.

        `continue_final_message` leaves the last message open, to be continued; it excludes `add_generation_prompt`.
        `variables` are for the template. Raises BadRequest if the template refuses the messages.
        """
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message leaves the last message open and add_generation_prompt begins another;"
                " set one of them to false",
                param="continue_final_message",
            )
        chat = [_tidy(message) for message in messages]
        ending = _open_last(chat) if continue_final_message else None
        scope = {
            **self._special,
            "documents": None,
            **variables,
            "messages": chat,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._plain if tools is None else self._for_tools
        try:
            text = template.render(scope)
        except jinja2.TemplateError as error:
            raise BadRequest(_line(error), param="messages") from None
        except Exception as error:  # a template is foreign code: whatever it trips over, the request cannot be rendered
            raise BadRequest(
                f"The model's chat template cannot render these messages ({_line(error)})", param="messages"
            ) from None
        return text if ending is None else _cut_open(text, ending)

    def _probe_parts(self) -> bool:
        word = "probe"
        try:
            text = self.render([{"role": "user", "content": [{"type": "text", "text": word}]}])
        except BadRequest:
            return False
        printed_as_python_or_json = f"'{word}'" in text or f'"{word}"' in text
        return word in text and not printed_as_python_or_json


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which marks for training what the assistant said. Here: its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    """jinja2 as chat templates expect it: white space around blocks trimmed, JSON without HTML escapes."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """The template, and the names that it reads without having set them. Raises jinja2.TemplateSyntaxError."""
    environment = _environment()
    names = meta.find_undeclared_variables(environment.parse(source))
    return environment.from_string(source), frozenset(names)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _sources(folder: Path) -> dict[str, str]:
    """The templates by name. Files of their own come before what tokenizer_config.json holds."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        try:
            return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"the chat template of {folder} cannot be read: {error}; fetch the model again") from None
    match read_json(folder / "tokenizer_config.json").get("chat_template"):
        case None:
            return {}
        case str(source):
            return {"default": source}
        case [*named] if all(_is_named(entry) for entry in named):
            return {entry["name"]: entry["template"] for entry in named}
        case _:
            raise StartError(
                f"chat_template in {folder / 'tokenizer_config.json'} is neither a string nor a list of"
                " named templates; fetch the model again"
            )


def _is_named(entry: object) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))


def _tidy(message: Message) -> dict[str, Any]:
    """A message without keys that are null, and with its reasoning under the names that templates read."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in _REASONING if name in kept), None)
    if reasoning is None:
        return kept
    return {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _open_last(chat: list[dict[str, Any]]) -> str:
    """Put the mark behind the last message's text. Returns that text."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _MARK
        return content
    parts = list(content) if isinstance(content, list | tuple) else []
    for index in range(len(parts) - 1, -1, -1):
        if isinstance(parts[index], Mapping) and isinstance(parts[index].get("text"), str):
            text: str = parts[index]["text"]
            parts[index] = {**parts[index], "text": text + _MARK}
            chat[-1]["content"] = parts
            return text
    raise BadRequest("continue_final_message needs a last message with text to continue", param="messages")


def _cut_open(text: str, ending: str) -> str:
    """The rendered text up to the mark."""
    mark = _MARK.strip()
    end = text.rfind(mark)
    if end < 0 or ending.strip() not in text:
        raise BadRequest(
            "continue_final_message cannot be used: the model's chat template does not keep the last message's text",
            param="continue_final_message",
        )
    trimmed = not text.startswith(_MARK, end)
    return text[:end].rstrip() if trimmed else text[:end]


def _line(error: Exception) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, jinja2.TemplateError) and text else f"{type(error).__name__}: {text}"
