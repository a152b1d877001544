"""What chat and completions share: from a body to a request, and from deltas to an answer, streamed or whole."""

import asyncio
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from msgspec.structs import replace

from toka.api import errors
from toka.api.chunks import Chunks
from toka.api.details import Asked, Details
from toka.api.exchange import ClientGone, Endpoint, Exchange, Hangup
from toka.api.fields import Schema
from toka.api.limits import check_fewest, check_prompts, fit
from toka.api.logprobs import Names, mean
from toka.api.relay import Relay, copies, prompt_only
from toka.api.reply import Reply, Tally, Whole
from toka.api.sampling import check_logprobs, logprobs_of, sampling_of
from toka.api.schemas import CompletionBody, GenerationBody, Usage
from toka.api.service import Service
from toka.api.stream import EventStream
from toka.errors import BadRequest, DeadlinePassed
from toka.request import Delta, Listener, Request

INLINE_CHARS = 8192
"""Longer texts are tokenized in a thread: one long word can take seconds."""
LONGEST_TIMER = 1e6
"""Seconds: eleven days. Event loops refuse timers of centuries."""

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


@dataclass(frozen=True, slots=True)
class Job(Generic[B]):
    """A request that may be submitted, and how it is answered."""

    body: B
    label: Label
    request: Request
    samples: int
    """Choices of each prompt, before the best are taken. Of a greedy request the engine makes one."""
    no_answer: bool
    """max_tokens is 0: whatever the engine samples is dropped."""
    details: Details | None

    def tally(self) -> Tally:
        """The books of its answer."""
        prompts = self.request.prompts
        return Tally(len(prompts) * self.samples, sum(map(len, prompts)))


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
    def usual_limit(self, prompts: Sequence[Sequence[int]]) -> int | None:
        """New tokens of each choice where the client says nothing; None: what the context holds."""

    def max_tokens(self, body: B, prompts: Sequence[Sequence[int]]) -> int | None:
        """New tokens of each choice, None for what the context holds. Raises ContextLengthExceeded."""
        asked = limit_of(body)
        if asked is None:
            return self.usual_limit(prompts)
        context = self.service.server.max_model_len
        overflow = self.service.config.max_tokens_overflow
        return fit(asked, prompts, context=context, param=self.param, overflow=overflow, name=limit_name(body))

    @abstractmethod
    def whole(self, job: "Job[B]", choices: list[Delta], usage: Usage) -> object:
        """The body of an answer that is not streamed."""

    def check_text(self, text: str) -> None:
        """For a prompt about to be tokenized. Raises ContextLengthExceeded, or Unavailable while the model loads."""
        service = self.service
        check_fewest(service.tokenizer.fewest(text), context=service.server.max_model_len, param=self.param)

    async def serve(self, exchange: Exchange) -> None:
        """The whole life of a request. Everything is checked before the engine hears of it."""
        body = self.schema.parse(await exchange.read_json(self.service.config.max_body_bytes))
        text = self.check(body)
        hangup = Hangup(exchange.receive)
        try:
            job = await self.job(body, text)
            if hangup.gone:
                raise ClientGone("before the engine heard of it")
            await self._answer(exchange, hangup, job)
        finally:
            hangup.close()

    def check(self, body: B) -> Text:
        """All that can be said of a body before its text is tokenized. Raises RequestError."""
        config = self.service.config
        self.service.model(body.model)
        check_common(body, config.max_n)
        check_logprobs(body, config.max_logprobs)
        return self.text(body)

    async def job(self, body: B, text: Text) -> "Job[B]":
        """Tokenize, and make the request. Raises RequestError."""
        service = self.service
        prompts = text.tokenize() if text.chars <= INLINE_CHARS else await asyncio.to_thread(text.tokenize)
        model = service.model(body.model)
        label = Label(self.id_prefix + secrets.token_hex(16), int(time.time()), model, service.fingerprint)
        return self._job(body, label, prompts)

    def _job(self, body: B, label: Label, prompts: list[list[int]]) -> "Job[B]":
        service = self.service
        sampling = sampling_of(body, service.defaults, service.tokenizer.vocab_size)
        no_answer = limit_of(body) == 0
        scored = sampling.prompt_logprobs >= 0
        context = service.server.max_model_len
        check_prompts(prompts, context=context, param=self.param, new=0 if no_answer and not scored else 1)
        max_tokens = self.max_tokens(body, prompts)
        if max_tokens is not None and body.min_tokens > max_tokens:
            raise errors.wrong_value(
                "min_tokens", f"it is more than the {max_tokens} tokens that the answer may have at most."
            )
        if no_answer and scored:
            max_tokens = 1
        samples = body.best_of or body.n
        greedy = sampling.temperature == 0
        stop = body.stop or ()
        request = Request(
            id=label.id,
            prompts=prompts,
            n=1 if greedy else samples,
            max_tokens=max_tokens,
            sampling=sampling,
            seed=body.seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            include_stop=body.include_stop_str_in_output,
            stop_ids=tuple(dict.fromkeys(body.stop_token_ids)),
            ignore_eos=body.ignore_eos,
            stream=body.stream,
            priority=body.priority,
            cache_salt=body.cache_salt,
        )
        return Job(body, label, request, samples, no_answer, self._details(body, prompts, body.n))

    def _details(self, body: B, prompts: list[list[int]], samples: int) -> Details | None:
        """What is to be told besides the text; None: nothing."""
        echoed = self.echoed(body, prompts)
        asked = Asked(
            logprobs=logprobs_of(body),
            prompt_logprobs=-1 if body.prompt_logprobs is None else body.prompt_logprobs,
            token_ids=body.return_token_ids,
            echo=echoed is not None,
        )
        if asked == Asked():
            return None
        names = Names(self.service.tokenizer, body.return_tokens_as_token_ids)
        return Details(asked, names, prompts, echoed or [], samples)

    def echoed(self, body: B, prompts: list[list[int]]) -> list[str] | None:
        """The prompts' texts, if they come before the answers."""
        return None

    def begin(self, job: "Job[B]", reply: Reply) -> None:
        """Submit the request. Raises RequestError."""
        if job.request.max_tokens == 0:
            reply.deliver([Delta(index, "", 0, "length") for index in range(reply.tally.open)])
            return
        listener: Listener = reply
        if job.no_answer:
            listener = Relay(listener, prompt_only)
        if job.request.n < job.samples:
            listener = Relay(listener, copies(job.samples))
        reply.tally.generation = self.service.server.submit(job.request, listener)

    def collected(self, job: "Job[B]", whole: Whole) -> object:
        """The body of an answer that is complete and not streamed."""
        return self.whole(job, best(whole.choices(), job.samples, job.body.n), whole.tally.usage())

    async def _answer(self, exchange: Exchange, hangup: Hangup, job: "Job[B]") -> None:
        tally = job.tally()
        reply: Reply
        whole: Whole | None = None
        if job.request.stream:
            reply = EventStream(exchange, tally, self._chunks(job, tally))
        else:
            reply = whole = Whole(tally)
        hangup.tell(reply.hang_up)
        alarm = deadline(job.body.timeout_s, reply)
        try:
            self.begin(job, reply)
            await reply.finished
        finally:
            if alarm is not None:
                alarm.cancel()
            reply.close()
        if reply.failure is not None:
            raise reply.failure
        if reply.gone:
            raise ClientGone("before the answer was whole")
        if whole is not None:
            await exchange.respond_json(self.collected(job, whole))

    def _chunks(self, job: "Job[B]", tally: Tally) -> Chunks:
        label, options = job.label, job.body.stream_options
        return self.chunks(
            tally,
            id=label.id,
            created=label.created,
            model=label.model,
            fingerprint=label.fingerprint,
            include_usage=options is not None and bool(options.include_usage),
            running=options is not None and bool(options.continuous_usage_stats),
            details=job.details,
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
        if body.stream or not isinstance(body, CompletionBody):
            raise errors.unsupported("best_of")
        if body.best_of > max_n:
            raise errors.out_of_range("best_of", "integer", "<=", max_n, body.best_of)
    if body.stream_options is not None and not body.stream:
        raise BadRequest(
            "The 'stream_options' parameter is only allowed when 'stream' is true.",
            param="stream_options",
            code="invalid_value",
        )


def best(choices: list[Delta], samples: int, n: int) -> list[Delta]:
    """Of each prompt's `samples` the `n` with the highest mean log-probability, best first, numbered anew."""
    if samples == n:
        return choices
    kept: list[Delta] = []
    for start in range(0, len(choices), samples):
        kept += sorted(choices[start : start + samples], key=lambda one: -mean(one.scores))[:n]
    return [replace(one, index=index) for index, one in enumerate(kept)]


def deadline(seconds: float | None, reply: Reply) -> asyncio.TimerHandle | None:
    """Fail the reply after so many seconds; None: never."""
    if seconds is None:
        return None
    error = DeadlinePassed(f"The request took longer than its timeout_s of {seconds:g} seconds.")
    return asyncio.get_running_loop().call_later(min(seconds, LONGEST_TIMER), reply.fail, error)
