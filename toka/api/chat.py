"""POST /v1/chat/completions: messages in, the assistant's next message out."""

from collections.abc import Sequence

from msgspec import UNSET

from toka.api import errors
from toka.api.chunks import ChatChunks
from toka.api.details import Shown
from toka.api.fields import CHAT
from toka.api.generate import Generate, Job, Text
from toka.api.limits import last, limit_name, limit_of
from toka.api.logprobs import Entry, chat_logprobs
from toka.api.messages import check_continues, conversation
from toka.api.schemas import ChatBody, ChatChoice, ChatCompletion, ChatLogprobs, ChatMessage, TextLogprobs, Usage
from toka.api.service import ChatTemplate
from toka.api.variables import variables_of
from toka.errors import BadRequest, Unsupported
from toka.request import Delta


class Chat(Generate[ChatBody]):
    """The endpoint that most clients use."""

    schema = CHAT
    id_prefix = "chatcmpl-"
    param = "messages"
    chunks = ChatChunks

    def text(self, body: ChatBody) -> Text:
        """A conversation without tools, to be answered with at least one token."""
        check_tools(body)
        if limit_of(body) == 0:
            raise errors.out_of_range(limit_name(body), "integer", ">=", 1, 0)
        return self.prompt(body)

    def prompt(self, body: ChatBody, tools: list[dict[str, object]] | None = None) -> Text:
        """Messages are checked here, rendered and tokenized later. The template writes BOS, not the tokenizer."""
        template = self._template(body)
        variables = variables_of(body, template, self.service.names[0])
        going_on = body.continue_final_message
        if going_on and body.add_generation_prompt:
            raise BadRequest(
                "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
                param="add_generation_prompt",
                code="invalid_value",
            )
        messages = conversation(body.messages, template, self.service.names[0])
        if going_on:
            check_continues(messages)
        prompting = not going_on if body.add_generation_prompt is None else body.add_generation_prompt
        tokenizer, keep = self.service.tokenizer, self.kept(body)

        def tokenize() -> list[list[int]]:
            try:
                text = template.render(
                    messages,
                    add_generation_prompt=prompting,
                    continue_final_message=going_on,
                    tools=tools,
                    **variables,
                )
            except RecursionError:
                raise BadRequest(
                    "The messages are nested too deeply for the chat template.", param="messages"
                ) from None
            self.check_text(body, text)
            ids = tokenizer.encode(text, add_special_tokens=False)
            if not ids:
                raise BadRequest("The chat template made an empty prompt of these messages.", param="messages")
            return [last(ids, keep)]

        return Text(chars(messages) + chars(tools), tokenize)

    def _template(self, body: ChatBody) -> ChatTemplate:
        """The model's, or the client's own. Raises BadRequest."""
        template = self.service.chat()
        if body.chat_template is None:
            return template
        if not self.service.config.trust_request_chat_template:
            raise Unsupported(
                "Unsupported parameter: 'chat_template' is code that this server would run. It takes templates from "
                "requests only if it is started with trust_request_chat_template=T.",
                param="chat_template",
            )
        return template.other(body.chat_template)

    @staticmethod
    def shape(entries: Sequence[Entry]) -> ChatLogprobs:
        """OpenAI's for chats."""
        return chat_logprobs(entries)

    def usual_limit(self) -> int | None:
        """The rest of the context."""
        return None

    def whole(self, job: Job[ChatBody], choices: list[Delta], usage: Usage) -> ChatCompletion:
        """An answer that is not streamed."""
        label, details = job.label, job.details
        shown = [None if details is None else details.take(one) for one in choices]
        first = shown[0]
        return ChatCompletion(
            id=label.id,
            created=label.created,
            model=label.model,
            system_fingerprint=label.fingerprint,
            choices=[chat_choice(one, detail) for one, detail in zip(choices, shown, strict=True)],
            usage=usage,
            prompt_token_ids=UNSET if first is None or first.prompt_ids is None else first.prompt_ids,
            prompt_logprobs=UNSET if first is None or first.prompt is None else first.prompt,
        )


def chat_choice(delta: Delta, shown: Shown | None) -> ChatChoice:
    """A whole choice."""
    assert delta.finish_reason is not None
    logprobs, ids = (None, None) if shown is None else (shown.logprobs, shown.ids)
    assert not isinstance(logprobs, TextLogprobs)
    return ChatChoice(
        delta.index,
        ChatMessage(delta.text),
        delta.finish_reason,
        delta.stop_reason,
        logprobs,
        UNSET if ids is None else list(ids),
    )


def check_tools(body: ChatBody) -> None:
    """Tools are refused unless the model is not to call any, and then it is not told of them. Raises Unsupported."""
    if body.tools and body.tool_choice != "none":
        raise errors.unsupported("tools")
    if body.tool_choice not in ("none", "auto"):
        raise errors.unsupported("tool_choice")


def chars(value: object) -> int:
    """Characters in all strings of a message, or of a list of them."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(chars, value.values()))
    if isinstance(value, list):
        return sum(map(chars, value))
    return 0
