"""What chat and completions share: from a body to a request, and from deltas to an answer, streamed or whole."""

import asyncio
import dataclasses
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from toka.api import errors
from toka.api.aside import aside
from toka.api.chunks import Chunks
from toka.api.details import Asked, Details
from toka.api.exchange import ClientGone, Endpoint, Exchange, GoneEarly, Hangup
from toka.api.fields import Schema
from toka.api.idempotency import Run, Runs
from toka.api.limits import check_fewest, check_prompts, fit, kept, limit_name, limit_of
from toka.api.logprobs import Entry, Lists, Names
from toka.api.relay import Paced, Relay, best, copies, prompt_only
from toka.api.reply import Reply, Tally, Whole
from toka.api.sampling import check_logprobs, logprobs_of, sampling_of
from toka.api.schemas import CompletionBody, GenerationBody, Usage
from toka.api.service import Service, Tokenizer
from toka.api.stream import SILENCE, EventStream
from toka.api.weight import apart
from toka.errors import BadRequest, DeadlinePassed
from toka.request import Delta, Generation, Listener, Request

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

    @property
    def choices(self) -> int:
        """How many the engine's listener hears of."""
        return len(self.request.prompts) * self.samples

    def tally(self) -> Tally:
        """The books of its answer."""
        return Tally(self.choices, sum(map(len, self.request.prompts)))

    def afresh(self) -> "Job[B]":
        """The same, for another who hears it from the start."""
        return self if self.details is None else dataclasses.replace(self, details=self.details.afresh())


class Generate(Endpoint, Generic[B]):
    """POST: one request for the engine."""

    methods = ("POST",)
    schema: Schema[B]
    id_prefix: ClassVar[str]
    param: ClassVar[str]
    """The field that holds the prompt."""
    chunks: ClassVar[type[Chunks]]
    silence: ClassVar[float] = SILENCE
    """Seconds without a byte after which a stream gives a sign of life."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.runs = Runs(self.prepare, self.begin)

    @abstractmethod
    def text(self, body: B) -> Text:
        """Check what is particular to this endpoint, before any work. Raises BadRequest."""

    @staticmethod
    @abstractmethod
    def shape(entries: Sequence[Entry]) -> Lists:
        """The endpoint's lists of log-probabilities."""

    @abstractmethod
    def usual_limit(self) -> int | None:
        """New tokens of each choice where the client says nothing, and the context holds them; None: what it holds."""

    def max_tokens(self, body: B, prompts: Sequence[Sequence[int]]) -> int | None:
        """New tokens of each choice at most, None for what the context holds. Raises ContextLengthExceeded."""
        asked = limit_of(body)
        if asked is None:
            return self.usual_limit()
        context = self.service.server.max_model_len
        overflow = self.service.config.max_tokens_overflow
        return fit(asked, prompts, context=context, param=self.param, overflow=overflow, name=limit_name(body))

    @abstractmethod
    def whole(self, job: "Job[B]", choices: list[Delta], usage: Usage) -> object:
        """The body of an answer that is not streamed."""

    def kept(self, body: B) -> int | None:
        """Tokens of each prompt to keep, the last ones; None: all. Raises BadRequest, or Unavailable."""
        asked = limit_of(body)
        return kept(
            body.truncate_prompt_tokens,
            context=self.service.server.max_model_len,
            answer=max(1, asked if asked is not None else self.usual_limit() or 1),
        )

    def shown_by(self, body: B) -> Tokenizer:
        """What makes text of ids, for a client that does or does not want to see special tokens."""
        tokenizer = self.service.tokenizer
        return tokenizer if body.skip_special_tokens else tokenizer.spelled

    def check_text(self, body: B, text: str) -> None:
        """For a prompt about to be tokenized. Raises ContextLengthExceeded, or Unavailable while the model loads."""
        if body.truncate_prompt_tokens is not None:
            return
        service = self.service
        check_fewest(service.tokenizer.fewest(text), context=service.server.max_model_len, param=self.param)

    async def serve(self, exchange: Exchange) -> None:
        """The whole life of a request. Everything is checked before the engine hears of it."""
        run = await self.runs.open(exchange, self.service.config.max_body_bytes)
        hangup = Hangup(exchange.receive)
        try:
            with run:
                [job] = await run.jobs()
                if hangup.gone:
                    raise GoneEarly("before the engine heard of it")
                await self._answer(exchange, hangup, run, job.afresh())
        finally:
            hangup.close()

    async def prepare(self, body: bytes, tenant: str) -> "list[Job[B]]":
        """The one request of a body, checked and tokenized. Where there is no room for it, nothing of that is done.
        Raises RequestError."""
        self.service.server.check_room(tenant)

        def read() -> tuple[B, Text]:
            parsed = self.schema.parse(body)
            return parsed, self.check(parsed)

        job = await self.job(*await apart(body, read), tenant)
        self.service.server.check_room(tenant)  # others may have come while a long text was tokenized
        return [job]

    def check(self, body: B) -> Text:
        """All that can be said of a body before its text is tokenized. Raises RequestError."""
        config = self.service.config
        self.service.model(body.model)
        check_common(body, config.max_n)
        check_logprobs(body, config.max_logprobs)
        spelled = not body.skip_special_tokens
        if spelled and not body.spaces_between_special_tokens and self.service.tokenizer.spaces_names:
            raise errors.unsupported("spaces_between_special_tokens")
        return self.text(body)

    async def job(self, body: B, text: Text, tenant: str) -> "Job[B]":
        """Tokenize, and make the request. Raises RequestError."""
        service = self.service
        with service.metrics.tokenized():
            prompts = text.tokenize() if text.chars <= INLINE_CHARS else await aside(text.tokenize)
        model = service.model(body.model)
        label = Label(self.id_prefix + secrets.token_hex(16), int(time.time()), model, service.fingerprint)
        return self._job(body, label, prompts, tenant)

    def _job(self, body: B, label: Label, prompts: list[list[int]], tenant: str) -> "Job[B]":
        service = self.service
        sampling = sampling_of(body, service.defaults, service.tokenizer.vocab_size)
        no_answer = limit_of(body) == 0
        scored = sampling.prompt_logprobs >= 0
        context = service.server.max_model_len
        check_prompts(prompts, context=context, param=self.param, new=0 if no_answer and not scored else 1)
        max_tokens = self.max_tokens(body, prompts)
        room = context - max(map(len, prompts))
        most = room if max_tokens is None else min(max_tokens, room)
        if body.min_tokens > most:
            raise errors.wrong_value(
                "min_tokens", f"it is more than the {most} tokens that the answer may have at most."
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
            clamp=limit_of(body) is None or service.config.max_tokens_overflow == "clamp",
            sampling=sampling,
            seed=body.seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            include_stop=body.include_stop_str_in_output,
            stop_ids=tuple(dict.fromkeys(body.stop_token_ids)),
            ignore_eos=body.ignore_eos,
            skip_special=body.skip_special_tokens,
            stream=body.stream,
            priority=body.priority,
            cache_salt=self.salt(body, tenant),
            tenant=tenant,
        )
        return Job(body, label, request, samples, no_answer, self._details(body, prompts, body.n))

    def salt(self, body: B, tenant: str) -> str:
        """Who shares cached prefixes with this request: those of equal salt, and of the same key if keys are apart."""
        return f"{tenant}\0{body.cache_salt}" if self.service.config.cache_isolation == "key" else body.cache_salt

    def _details(self, body: B, prompts: list[list[int]], samples: int) -> Details | None:
        """What is to be told besides the text; None: nothing."""
        echoed = self.echoed(body, prompts)
        asked = Asked(
            logprobs=logprobs_of(body),
            prompt_logprobs=-1 if body.prompt_logprobs is None else body.prompt_logprobs,
            token_ids=body.return_token_ids,
            echo=echoed is not None,
            packed=body.logprobs_format == "packed",
        )
        if not asked.anything:
            return None
        names = Names(self.shown_by(body), body.return_tokens_as_token_ids)
        return Details(asked, names, prompts, echoed or [], samples, self.shape)

    def echoed(self, body: B, prompts: list[list[int]]) -> list[str] | None:
        """The prompts' texts, if they come before the answers."""
        return None

    def begin(self, job: "Job[B]", listener: Listener) -> Generation | None:
        """Submit the request; None: it needs no engine and is answered. Raises RequestError."""
        if job.request.max_tokens == 0:
            listener.deliver([Delta(index, "", 0, "length") for index in range(job.choices)])
            return None
        if job.no_answer:
            listener = Relay(listener, prompt_only)
        if job.request.n < job.samples:
            listener = Relay(listener, copies(job.samples))
        return self.service.server.submit(job.request, listener)

    def collected(self, job: "Job[B]", whole: Whole) -> object:
        """The body of an answer that is complete and not streamed."""
        return self.whole(job, best(whole.choices(), job.samples, job.body.n), whole.tally.usage())

    async def _answer(self, exchange: Exchange, hangup: Hangup, run: "Run[Job[B]]", job: "Job[B]") -> None:
        tally = job.tally()
        reply: Reply
        whole: Whole | None = None
        if job.request.stream:
            reply = EventStream(exchange, tally, self._chunks(job, tally), silence=self.silence)
        else:
            reply = whole = Whole(tally)
        interval = job.body.stream_interval or self.service.config.stream_interval
        listener: Listener = Paced(reply, interval) if job.request.stream and interval > 1 else reply
        hangup.tell(reply.hang_up)
        alarm = deadline(job.body.timeout_s, reply)
        try:
            run.begin(0, tally, listener)
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


def deadline(seconds: float | None, reply: Reply) -> asyncio.TimerHandle | None:
    """Fail the reply after so many seconds; None: never."""
    if seconds is None:
        return None
    error = DeadlinePassed(f"The request took longer than its timeout_s of {seconds:g} seconds.")
    return asyncio.get_running_loop().call_later(min(seconds, LONGEST_TIMER), reply.fail, error)
