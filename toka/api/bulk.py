"""Many chat requests in one body, answered together: /v1/chat/completions/batch."""

import asyncio
import time

import msgspec

from toka.api import errors
from toka.api.chat import Chat
from toka.api.exchange import ClientGone, Endpoint, Exchange, GoneEarly, Hangup
from toka.api.fields import decode
from toka.api.generate import Job, Text, deadline
from toka.api.idempotency import Runs
from toka.api.limits import MAX_CHOICES
from toka.api.reply import Whole
from toka.api.schemas import ChatBody
from toka.api.weight import apart
from toka.errors import BadRequest, RequestError

SLICE = 0.01
"""Seconds of work after which everybody else gets a turn."""


class Turns:
    """Lets the event loop turn during work that is long in all, though each of its parts is short."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def next(self) -> None:
        """To be awaited after each part."""
        if time.monotonic() - self._since > SLICE:
            await asyncio.sleep(0)
            self._since = time.monotonic()


class Bulk(Endpoint):
    """POST a list of chat requests, bare or as `requests`; the answer is the list of their answers, in order.

    Every request is checked before any runs, and one that cannot be served fails them all.
    """

    methods = ("POST",)

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.runs = Runs(self.prepare, chat.begin)

    async def serve(self, exchange: Exchange) -> None:
        """Answer, or raise RequestError."""
        chat = self._chat
        run = await self.runs.open(exchange, chat.service.config.max_body_bytes)
        hangup = Hangup(exchange.receive)
        replies: list[Whole] = []
        alarms: list[asyncio.TimerHandle] = []
        turns = Turns()
        try:
            with run:
                jobs = [job.afresh() for job in await run.jobs()]
                if hangup.gone:
                    raise GoneEarly("before the engine heard of it")
                for number, job in enumerate(jobs):
                    reply = Whole(job.tally())
                    replies.append(reply)
                    if alarm := deadline(job.body.timeout_s, reply):
                        alarms.append(alarm)
                    run.begin(number, reply.tally, reply)
                    await turns.next()

                def hang_up() -> None:
                    for reply in replies:
                        reply.hang_up()

                hangup.tell(hang_up)
                await settled(replies)
                for reply in replies:
                    if reply.failure is not None:
                        raise reply.failure
                    if reply.gone:
                        raise ClientGone("before the answers were whole")
        finally:
            hangup.close()
            for alarm in alarms:
                alarm.cancel()
            for reply in replies:
                reply.close()
        answers = []
        for job, reply in zip(jobs, replies, strict=True):
            answers.append(msgspec.json.encode(chat.collected(job, reply)))
            await turns.next()
        await exchange.respond(200, b"[" + b",".join(answers) + b"]")

    async def prepare(self, body: bytes, tenant: str) -> list[Job[ChatBody]]:
        """The requests of a body, all checked and then tokenized. Raises RequestError."""
        chat = self._chat
        chat.service.server.check_room(tenant)

        def read() -> list[tuple[ChatBody, Text]]:
            bodies = parse(chat, body)
            check_count(bodies)
            return [(one, check(chat, one, index)) for index, one in enumerate(bodies)]

        jobs = []
        turns = Turns()
        for index, (one, text) in enumerate(await apart(body, read)):
            try:
                jobs.append(await chat.job(one, text, tenant))
            except RequestError as error:
                raise at(error, index) from None
            await turns.next()
        chat.service.server.check_room(tenant)
        return jobs


async def settled(replies: list[Whole]) -> None:
    """Until all are complete, or one cannot be."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waited_for = set(replies)

    def ended(reply: Whole) -> None:
        waited_for.discard(reply)
        if not over.done() and (not waited_for or reply.failure is not None or reply.gone):
            over.set_result(None)

    for reply in replies:
        reply.finished.add_done_callback(lambda _, reply=reply: ended(reply))  # type: ignore[misc]  # of a default
    await over


def parse(chat: Chat, body: bytes) -> list[ChatBody]:
    """The requests of a body. Raises BadRequest, with the path of what is wrong."""
    decoded = decode(body)
    if isinstance(decoded, dict):
        unknown = sorted(decoded.keys() - {"requests"})
        if unknown:
            raise errors.unknown(unknown[0], ["requests"])
        decoded = decoded.get("requests")
        if decoded is None:
            raise errors.missing("requests")
    if not isinstance(decoded, list):
        raise errors.wrong_type("requests", "an array", decoded)
    if not decoded:
        raise errors.empty("requests", "array")
    bodies = []
    for index, one in enumerate(decoded):
        try:
            bodies.append(chat.schema.check(one))
        except RequestError as error:
            raise at(error, index) from None
    return bodies


def check_count(bodies: list[ChatBody]) -> None:
    """All of them together may not have more than MAX_CHOICES answers. Raises BadRequest."""
    if len(bodies) > 1 and sum(body.n for body in bodies) > MAX_CHOICES:
        raise errors.too_long("requests", "array", f"{MAX_CHOICES} choices over all requests")


def check(chat: Chat, body: ChatBody, index: int) -> Text:
    """Whether one of the requests can be served. Raises RequestError."""
    try:
        if body.stream:
            raise BadRequest("Requests of a batch cannot be streamed.", param="stream", code="invalid_value")
        return chat.check(body)
    except RequestError as error:
        raise at(error, index) from None


def at(error: RequestError, index: int) -> RequestError:
    """The same error, of the request with this index."""
    param = f"requests[{index}]" + (f".{error.param}" if error.param else "")
    return type(error)(f"Request {index}: {error.message}", param=param, code=error.code)
