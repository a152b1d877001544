"""What chat and completions share: from a body to a request, and from deltas to an answer, streamed or whole."""

import asyncio
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from toka.api import errors
from toka.api.chunks import Chunks
from toka.api.exchange import ClientGone, Endpoint, Exchange, Hangup
from toka.api.fields import Schema
from toka.api.limits import check_fewest, check_prompts
from toka.api.reply import Choice, Reply, Tally, Whole
from toka.api.schemas import GenerationBody, Usage
from toka.api.service import Service
from toka.api.stream import EventStream
from toka.errors import BadRequest
from toka.request import Delta, Request, Sampling

INLINE_CHARS = 8192
"""Longer texts are tokenized in a thread: one long word can take seconds."""
GREEDY_BELOW = 1e-5
"""Temperatures below are 0: dividing by them overflows."""
MAX_TOP_K = 2**31 - 1

B = TypeVar("B", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class Text:
    """Prompts still to be made: how much text there is, and the work, which may run in a thread."""

    chars: int
    tokenize: Callable[[], list[list[int]]]


@dataclass(frozen=True, slots=True)
class Label:
    """What an answer and each of its chunks say of themselves."""

    id: str
    created: int
    model: str
    fingerprint: str


class Generate(Endpoint, Generic[B]):
    """POST: one request for the engine."""

    methods = ("POST",)
    schema: Schema[B]
    id_prefix: ClassVar[str]
    param: ClassVar[str]
    """The field that holds the prompt."""
    chunks: ClassVar[type[Chunks]]

    def __init__(self, service: Service) -> None:
        self.service = service

    @abstractmethod
    def text(self, body: B) -> Text:
        """Check what is particular to this endpoint, before any work. Raises BadRequest."""

    @abstractmethod
    def max_tokens(self, body: B, prompts: Sequence[Sequence[int]]) -> int | None:
        """New tokens of each choice, None for what the context holds. Raises ContextLengthExceeded."""

    @abstractmethod
    def whole(self, label: Label, choices: list[Choice], usage: Usage) -> object:
        """The body of an answer that is not streamed."""

    def check_text(self, text: str) -> None:
        """For a prompt about to be tokenized. Raises ContextLengthExceeded, or Unavailable while the model loads."""
        service = self.service
        check_fewest(service.tokenizer.fewest(text), context=service.server.max_model_len, param=self.param)

    async def serve(self, exchange: Exchange) -> None:
        """The whole life of a request. Everything is checked before the engine hears of it."""
        service = self.service
        body = self.schema.parse(await exchange.read_json(service.config.max_body_bytes))
        model = service.model(body.model)
        check_common(body, service.config.max_n)
        text = self.text(body)
        hangup = Hangup(exchange.receive)
        try:
            prompts = text.tokenize() if text.chars <= INLINE_CHARS else await asyncio.to_thread(text.tokenize)
            if hangup.gone:
                raise ClientGone("before the engine heard of it")
            label = Label(self.id_prefix + secrets.token_hex(16), int(time.time()), model, service.fingerprint)
            await self._answer(exchange, hangup, body, label, self._request(body, label.id, prompts))
        finally:
            hangup.close()

    def _request(self, body: B, id: str, prompts: list[list[int]]) -> Request:
        service = self.service
        context = service.server.max_model_len
        asked = limit_of(body)
        check_prompts(prompts, context=context, param=self.param, new=0 if asked == 0 else 1)
        stop = body.stop or ()
        return Request(
            id=id,
            prompts=prompts,
            n=body.n,
            max_tokens=self.max_tokens(body, prompts),
            sampling=sampling_of(body, service.defaults),
            seed=body.seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            ignore_eos=body.ignore_eos,
            stream=body.stream,
        )

    async def _answer(self, exchange: Exchange, hangup: Hangup, body: B, label: Label, request: Request) -> None:
        tally = Tally(len(request.prompts) * request.n, sum(map(len, request.prompts)))
        reply: Reply
        whole: Whole | None = None
        if request.stream:
            reply = EventStream(exchange, tally, self._chunks(body, label, tally))
        else:
            reply = whole = Whole(tally)
        hangup.tell(reply.hang_up)
        try:
            if request.max_tokens == 0:
                reply.deliver([Delta(index, "", 0, "length") for index in range(tally.open)])
            else:
                tally.generation = self.service.server.submit(request, reply)
            await reply.finished
        finally:
            reply.close()
        if reply.failure is not None:
            raise reply.failure
        if reply.gone:
            raise ClientGone("before the answer was whole")
        if whole is not None:
            await exchange.respond_json(self.whole(label, whole.choices(), tally.usage()))

    def _chunks(self, body: B, label: Label, tally: Tally) -> Chunks:
        options = body.stream_options
        return self.chunks(
            tally,
            id=label.id,
            created=label.created,
            model=label.model,
            fingerprint=label.fingerprint,
            include_usage=options is not None and bool(options.include_usage),
            running=options is not None and bool(options.continuous_usage_stats),
        )


def limit_of(body: GenerationBody) -> int | None:
    """New tokens that the client asked for."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def limit_name(body: GenerationBody) -> str:
    """The field that `limit_of` took it from."""
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def check_common(body: GenerationBody, max_n: int) -> None:
    """What one field says about another, and what the options say about fields. Raises BadRequest."""
    if body.n > max_n:
        raise errors.out_of_range("n", "integer", "<=", max_n, body.n)
    if body.best_of is not None and body.best_of != body.n:
        if body.best_of < body.n:
            raise errors.wrong_value("best_of", f"expected best_of >= n, but got {body.best_of} with n = {body.n}.")
        raise errors.unsupported("best_of")
    if body.stream_options is not None and not body.stream:
        raise BadRequest(
            "The 'stream_options' parameter is only allowed when 'stream' is true.",
            param="stream_options",
            code="invalid_value",
        )


def sampling_of(body: GenerationBody, defaults: Sampling) -> Sampling:
    """How to choose tokens; what the client left open is as in `defaults`."""
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_k = defaults.top_k if body.top_k is None else body.top_k
    return Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_k=min(max(top_k, 0), MAX_TOP_K),
    )
