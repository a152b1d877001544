"""How text leaves: one write a step and stream, made while the engine delivers; no task, queue or generator a token.

A stream writes by driving the server's `send` by hand. As long as the client keeps up, `send` runs through without
waiting and a write costs what the transport costs. When the client is slow, `send` waits in its middle: a task of its
own takes the half-run coroutine over, and what comes meanwhile is joined into one pending delta a choice.
"""

import asyncio
import logging
import types
from collections.abc import Generator

from starlette.types import Message

from toka.api.chunks import Chunks
from toka.api.exchange import Exchange
from toka.api.relay import joined
from toka.api.reply import Reply, Tally
from toka.errors import EngineFault, RequestError
from toka.request import Delta

SILENCE = 15.0
"""Seconds without a byte after which a stream says `: ping`. Proxies cut connections after 60."""
MOST_HELD = 256
"""Deltas of a choice that are kept for a slow client before they are joined: each takes as much memory as a line."""
PING = b": ping\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

Driven = Generator[object, object, object]
"""What `__await__` gives: a coroutine that can be driven by hand."""

log = logging.getLogger("toka.api")


@types.coroutine
def resume(driven: Driven, waiting: object) -> Generator[object, object, object]:
    """Go on with a half-run coroutine in a task. `waiting` is what it yielded last, for the task to wait for."""
    while True:
        try:
            yield waiting
        except GeneratorExit:
            driven.close()
            raise
        except BaseException as error:  # cancellation above all: it belongs to the coroutine, which may answer it
            try:
                waiting = driven.throw(error)
            except StopIteration as end:
                return end.value
        else:
            return (yield from driven)


class EventStream(Reply):
    """A Listener that writes server-sent events. The headers wait for the first delta, or for `silence` seconds."""

    def __init__(self, exchange: Exchange, tally: Tally, chunks: Chunks, *, silence: float = SILENCE) -> None:
        super().__init__(tally)
        self._exchange = exchange
        self._send = exchange.send
        self._chunks = chunks
        self._silence = silence
        self._loop = asyncio.get_running_loop()
        self._written_at = self._loop.time()
        self._timer = self._loop.call_at(self._written_at + silence, self._tick)
        self._sending: asyncio.Task[None] | None = None
        """Finishes a write that had to wait. While it runs nothing else is written."""
        self._held: dict[int, list[Delta]] = {}
        """What a slow client has not been sent, by choice."""
        self._held_failure: RequestError | None = None
        self._over = False
        """The last byte is written or on its way, or nobody wants it."""

    def __repr__(self) -> str:
        state = "over" if self._over else "waiting for the client" if self._sending else "open"
        return f"<EventStream {state}, {len(self._held)} choices held, {self.tally!r}>"

    def deliver(self, deltas: list[Delta]) -> None:
        """Write what a step brought, in one piece."""
        if self._over:
            return
        try:
            for delta in deltas:
                self.tally.count(delta)
            if self._sending is not None:
                self._hold(deltas)
            else:
                self._write_deltas(deltas)
        except Exception:  # a listener never raises into the engine
            log.exception("%r could not take a delta", self._exchange, extra=self._exchange.labels)
            self.fail(EngineFault("The server could not encode the answer. It is logged under your request id."))

    def fail(self, error: RequestError) -> None:
        """A plain status if nothing has been sent, else an error event and the end."""
        if self._over:
            return
        if not self._exchange.started:
            self._over = True
            super().fail(error)
        elif self._sending is not None:
            self._held_failure = error
        else:
            self._write(self._chunks.failure(error), last=True)

    def hang_up(self) -> None:
        self._over = True
        super().hang_up()

    def close(self) -> None:
        self._over = True
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()
        super().close()

    # Making events

    def _write_deltas(self, deltas: list[Delta]) -> None:
        out: list[bytes] = []
        for delta in deltas:
            self._chunks.add(out, delta)
        if self.tally.open == 0:
            out.append(self._chunks.end())
            self._write(b"".join(out), last=True)
        elif out:
            self._write(b"".join(out))

    def _hold(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            held = self._held.setdefault(delta.index, [])
            held.append(delta)
            if len(held) == MOST_HELD:
                held[:] = [joined(held)]

    def _tick(self) -> None:
        """The timer is set again only here, so that a write costs no timer."""
        due = self._written_at + self._silence
        if due <= self._loop.time() + 0.001:
            if self._sending is None and not self._over:
                self._write(PING)
            due = self._loop.time() + self._silence
        self._timer = self._loop.call_at(due, self._tick)

    # Writing

    def _write(self, body: bytes, *, last: bool = False) -> None:
        """Hand the bytes to the server, now if the client keeps up. The order of writes is the order of calls."""
        if last:
            self._over = True
        self._written_at = self._loop.time()
        message: Message = {"type": "http.response.body", "body": body, "more_body": not last}
        driven: Driven = (self._send(message) if self._exchange.started else self._first(message)).__await__()
        try:
            waiting = driven.send(None)
        except StopIteration:
            if last:
                self.finish()
        except Exception as error:
            self._broken(error)
        else:
            self._sending = self._loop.create_task(self._send_rest(driven, waiting, last))

    async def _first(self, message: Message) -> None:
        await self._send(self._exchange.start(200, HEADERS))
        await self._send(message)

    async def _send_rest(self, driven: Driven, waiting: object, last: bool) -> None:
        """Finish a write that had to wait, then write what was held meanwhile."""
        try:
            await resume(driven, waiting)
        except Exception as error:
            self._broken(error)
            return
        finally:
            self._sending = None
        self._written_at = self._loop.time()
        if last:
            self.finish()
            return
        if self._held and not self._over:
            held = [joined(deltas) for deltas in self._held.values()]
            self._held.clear()
            self._write_deltas(held)
        if self._held_failure is not None and self._sending is None and not self._over:
            self._write(self._chunks.failure(self._held_failure), last=True)

    def _broken(self, error: Exception) -> None:
        """The server's `send` failed: there is no client to write to."""
        log.debug("%r: a write failed: %r", self._exchange, error, extra=self._exchange.labels)
        self.hang_up()
