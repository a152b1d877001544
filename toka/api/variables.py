"""What a chat template is told besides the messages: the client's own variables, and how much to reason."""

from typing import Any

from toka.api import errors
from toka.api.schemas import ChatBody
from toka.api.service import ChatTemplate
from toka.errors import Unsupported

RESERVED = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
"""Names that `chat_template_kwargs` cannot set: they have a field of their own, or none."""
EFFORT = "reasoning_effort"
"""What templates that know degrees of reasoning call it, as the field is called."""
SWITCHES = ("enable_thinking", "thinking")
"""What templates call it that only know reasoning or none."""


def variables_of(body: ChatBody, template: ChatTemplate, model: str) -> dict[str, Any]:
    """The template's variables. What `chat_template_kwargs` says goes first.

    Raises BadRequest for a reserved name, and Unsupported for a `reasoning_effort` that would change nothing.
    """
    for name in RESERVED:
        if name in body.chat_template_kwargs:
            raise errors.wrong_value("chat_template_kwargs", f"'{name}' cannot be set here.")
    return reasoning(body.reasoning_effort, template, model) | body.chat_template_kwargs


def reasoning(effort: str | None, template: ChatTemplate, model: str) -> dict[str, Any]:
    """`reasoning_effort` in the template's own terms: its degree where the template knows degrees, and on, or off for
    `none`, where it has a switch. Raises Unsupported where it has neither, as OpenAI's models that do not reason."""
    if effort is None:
        return {}
    told: dict[str, Any] = {name: effort != "none" for name in SWITCHES if name in template.variables}
    if EFFORT in template.variables:
        told[EFFORT] = effort
    if not told:
        raise Unsupported(
            f"Unsupported parameter: 'reasoning_effort' is not supported with the model `{model}`: its chat template "
            "has no variable for it.",
            param=EFFORT,
        )
    return told
