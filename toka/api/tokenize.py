"""/tokenize, /detokenize and /tokenizer_info: the tokenizer, for clients that count or cut by tokens."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from toka.api import errors
from toka.api.aside import aside
from toka.api.chat import Chat
from toka.api.exchange import Endpoint, Exchange
from toka.api.fields import convert, decode
from toka.api.generate import INLINE_CHARS, Text
from toka.api.sampling import check_ids
from toka.api.schemas import ChatBody
from toka.api.service import Service
from toka.api.weight import apart
from toka.errors import BadRequest

CHAT_ONLY = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
"""Fields that a text cannot have."""


class TokenizeBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, object]], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """True for a prompt unless said. The chat template brings its own."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, object]] = []
    return_token_strs: bool = False


class DetokenizeBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


class Tokens(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Tokenize(Endpoint):
    """POST /tokenize."""

    methods = ("POST",)

    def __init__(self, service: Service, chat: Chat) -> None:
        self.service = service
        self._chat = chat

    async def serve(self, exchange: Exchange) -> None:
        """Answer, or raise RequestError."""
        service = self.service
        raw = await exchange.read_json(service.config.max_body_bytes)

        def read() -> tuple[TokenizeBody, Text]:
            body = convert(decode(raw), TokenizeBody)
            service.model(body.model)
            return body, self._text(body)

        body, text = await apart(raw, read)

        def answer() -> bytes:
            [ids] = text.tokenize()
            names = [service.tokenizer.token_of(id) for id in ids] if body.return_token_strs else None
            return msgspec.json.encode(Tokens(len(ids), service.server.max_model_len, ids, names))

        with service.metrics.tokenized():
            told = answer() if text.chars <= INLINE_CHARS else await aside(answer)
        await exchange.respond(200, told)

    def _text(self, body: TokenizeBody) -> Text:
        if body.prompt is not None and body.messages is not None:
            raise BadRequest("Give 'prompt' or 'messages', not both.", param="messages", code="invalid_value")
        if body.messages is not None:
            if body.add_special_tokens:
                raise errors.unsupported("add_special_tokens")
            return self._chat.prompt(
                ChatBody(
                    messages=body.messages,
                    add_generation_prompt=body.add_generation_prompt,
                    continue_final_message=body.continue_final_message,
                    chat_template_kwargs=body.chat_template_kwargs,
                ),
                body.tools or None,
            )
        prompt = body.prompt
        if prompt is None:
            raise errors.missing("prompt")
        for name in CHAT_ONLY:
            if getattr(body, name):
                raise errors.wrong_value(name, "it goes with 'messages'.")
        special = body.add_special_tokens is not False
        return Text(len(prompt), lambda: [self.service.tokenizer.encode(prompt, special)])


class Detokenize(Endpoint):
    """POST /detokenize."""

    methods = ("POST",)

    def __init__(self, service: Service) -> None:
        self.service = service

    async def serve(self, exchange: Exchange) -> None:
        """Answer, or raise RequestError."""
        service = self.service
        raw = await exchange.read_json(service.config.max_body_bytes)

        def read() -> DetokenizeBody:
            body = convert(decode(raw), DetokenizeBody)
            service.model(body.model)
            check_ids(body.tokens, "tokens", service.tokenizer.vocab_size)
            return body

        body = await apart(raw, read)
        text = await aside(lambda: service.tokenizer.spelled.decode(body.tokens))
        await exchange.respond_json({"prompt": text})


class TokenizerInfo(Endpoint):
    """GET /tokenizer_info: tokenizer_config.json, always with the class and the chat template."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def serve(self, exchange: Exchange) -> None:
        """Answer."""
        template = self.service.template
        info = {"tokenizer_class": "PreTrainedTokenizerFast", **self.service.tokenizer.settings}
        if template is not None:
            info["chat_template"] = template.source
        await exchange.respond_json(info)
