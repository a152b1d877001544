"""/tokenize, /detokenize and /tokenizer_info: the tokenizer, for clients that count or cut by tokens."""

import asyncio
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from toka.api import errors
from toka.api.chat import Chat
from toka.api.exchange import Endpoint, Exchange
from toka.api.generate import INLINE_CHARS, Text
from toka.api.sampling import check_ids
from toka.api.schemas import ChatBody
from toka.api.service import Service
from toka.errors import BadRequest

T = TypeVar("T")


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
        body = parse(await exchange.read_json(service.config.max_body_bytes), TokenizeBody)
        service.model(body.model)
        text = self._text(body)
        [ids] = text.tokenize() if text.chars <= INLINE_CHARS else await asyncio.to_thread(text.tokenize)
        names = [service.tokenizer.token_of(id) for id in ids] if body.return_token_strs else None
        await exchange.respond_json(Tokens(len(ids), service.server.max_model_len, ids, names))

    def _text(self, body: TokenizeBody) -> Text:
        if body.prompt is not None and body.messages is not None:
            raise BadRequest("Give 'prompt' or 'messages', not both.", param="messages", code="invalid_value")
        if body.messages is not None:
            if body.add_special_tokens:
                raise errors.unsupported("add_special_tokens")
            return self._chat.text(
                ChatBody(
                    messages=body.messages,
                    add_generation_prompt=body.add_generation_prompt,
                    continue_final_message=body.continue_final_message,
                    chat_template_kwargs=body.chat_template_kwargs,
                    tools=body.tools,
                )
            )
        prompt = body.prompt
        if prompt is None:
            raise errors.missing("prompt")
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
        body = parse(await exchange.read_json(service.config.max_body_bytes), DetokenizeBody)
        service.model(body.model)
        check_ids(body.tokens, "tokens", service.tokenizer.vocab_size)
        text = await asyncio.to_thread(service.tokenizer.decode, body.tokens, False)
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


def parse(body: bytes, struct: type[T]) -> T:
    """A small body. Raises BadRequest."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise errors.invalid_json(body, error) from None
    if not isinstance(decoded, dict):
        raise errors.not_an_object(decoded)
    try:
        return msgspec.convert({name: value for name, value in decoded.items() if value is not None}, struct)
    except msgspec.ValidationError as error:
        raise errors.invalid(error, decoded) from None
