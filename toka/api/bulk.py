"""Many chat requests in one body, answered together: /v1/chat/completions/batch."""

import asyncio

import msgspec

from toka.api import errors
from toka.api.chat import Chat
from toka.api.exchange import ClientGone, Endpoint, Exchange, Hangup
from toka.api.generate import Text, deadline
from toka.api.reply import Whole
from toka.api.schemas import ChatBody
from toka.errors import BadRequest, RequestError


class Bulk(Endpoint):
    """POST a list of chat requests, bare or as `requests`; the answer is the list of their answers, in order.

    Every request is checked before any runs, and one that cannot be served fails them all.
    """

    methods = ("POST",)

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    async def serve(self, exchange: Exchange) -> None:
        """Answer, or raise RequestError."""
        chat = self._chat
        bodies = parse(chat, await exchange.read_json(chat.service.config.max_body_bytes))
        texts = [check(chat, body, index) for index, body in enumerate(bodies)]
        hangup = Hangup(exchange.receive)
        replies: list[Whole] = []
        alarms: list[asyncio.TimerHandle] = []
        try:
            jobs = []
            for index, (body, text) in enumerate(zip(bodies, texts, strict=True)):
                try:
                    jobs.append(await chat.job(body, text))
                except RequestError as error:
                    raise at(error, index) from None
            if hangup.gone:
                raise ClientGone("before the engine heard of it")
            for job in jobs:
                reply = Whole(job.tally())
                replies.append(reply)
                if alarm := deadline(job.body.timeout_s, reply):
                    alarms.append(alarm)
                chat.begin(job, reply)

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
        await exchange.respond_json([chat.collected(job, reply) for job, reply in zip(jobs, replies, strict=True)])


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
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise errors.invalid_json(body, error) from None
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
