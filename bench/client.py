"""A client process: sends the requests it is told to, and says when each answer came. `bench/clients.py` starts it.

It speaks `bench/messages.py` over stdin and stdout. One event loop (uvloop), no threads; whatever the garbage collector
would find waits until the end.
"""

import asyncio
import contextlib
import gc
import ssl
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import BinaryIO

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.connection import Broken, Connection, Received
from bench.limits import many_files
from bench.messages import Answer, Ask, Connected, Finished, Go, Setup, decode_to_client, read, write

TICK = 0.01
"""Seconds between looks at how late the loop is."""
OPENING = 128
"""Connections that are opened at a time; servers queue only so many."""


class Client:
    """Connections, and the requests that wait for one."""

    def __init__(self, setup: Setup, out: BinaryIO) -> None:
        self.setup = setup
        self.out = out
        self.idle: list[Connection] = []
        self.lags: list[float] = []
        fields = {"host": f"{setup.host}:{setup.port}", "content-type": "application/json", **setup.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.head = f"POST {setup.path} HTTP/1.1\r\n{lines}"
        self.tls = ssl.create_default_context() if setup.tls else None
        if self.tls and setup.insecure:
            self.tls.check_hostname, self.tls.verify_mode = False, ssl.CERT_NONE

    async def connect(self) -> Connection:
        """One connection more. Raises OSError."""
        loop, setup = asyncio.get_running_loop(), self.setup
        _, made = await loop.create_connection(lambda: Connection(setup.text), setup.host, setup.port, ssl=self.tls)
        return made

    async def open(self, count: int) -> None:
        """Connections for later. Those that cannot be made now are made when they are needed."""
        for start in range(0, count, OPENING):
            made = [self.connect() for _ in range(start, min(start + OPENING, count))]
            for one in await asyncio.gather(*made, return_exceptions=True):
                if isinstance(one, Connection):
                    self.idle.append(one)

    def request(self, ask: Ask) -> bytes:
        """What goes over the wire."""
        id = f"x-request-id: {ask.id}\r\n" if ask.id else ""
        return f"{self.head}{id}content-length: {len(ask.body)}\r\n\r\n".encode() + ask.body

    async def ask(self, ask: Ask) -> None:
        """Send one request and report what came."""
        request, sent = self.request(ask), perf_counter()
        while True:
            connection, fresh = None, False
            while self.idle and (connection is None or not connection.open):
                connection = self.idle.pop()
            try:
                if connection is None or not connection.open:
                    connection, fresh = await self.connect(), True
                received = await connection.ask(request, ask.n > 1)
            except (Broken, OSError) as error:
                # A server may close a connection that waits, at any time: that is no failed request.
                if isinstance(error, Broken) and error.untouched and not fresh:
                    continue
                self.say(Answer(index=ask.index, sent=sent, last=perf_counter(), error=str(error) or repr(error)))
                return
            if connection.open:
                self.idle.append(connection)
            self.say(answer(ask, received, self.setup.stream))
            return

    def say(self, message: Answer | Finished | Connected) -> None:
        """Write a message, which leaves with the next tick or at the end."""
        write(self.out, message)

    async def tick(self) -> None:
        """Measure how late the loop is, and let messages leave."""
        while True:
            due = perf_counter() + TICK
            await asyncio.sleep(TICK)
            self.lags.append(max(perf_counter() - due, 0.0))
            self.out.flush()

    async def run(self, asks: list[Ask], go: Go) -> None:
        """A round: all of these requests."""
        self.lags.clear()
        await asyncio.sleep(go.at - perf_counter())
        ticking = asyncio.create_task(self.tick())
        cpu, started = time.process_time(), perf_counter()
        if go.wave:
            for start in range(0, len(asks), go.concurrency):
                await self._at_their_times(asks[start : start + go.concurrency], go.at, 0)
        else:
            await self._at_their_times(asks, go.at, go.concurrency)
        cpu, wall = time.process_time() - cpu, perf_counter() - started
        ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking
        self.say(Finished(cpu=cpu, wall=wall, lags=packed(self.lags)))
        self.out.flush()

    async def _at_their_times(self, asks: Iterable[Ask], start: float, concurrency: int) -> None:
        """Each when its time has come, and when fewer than `concurrency` are under way."""
        room = asyncio.Semaphore(concurrency) if concurrency else None
        tasks = []
        for ask in asks:
            if ask.at and (rest := start + ask.at - perf_counter()) > 0:
                await asyncio.sleep(rest)
            if room is not None:
                await room.acquire()
            task = asyncio.create_task(self.ask(ask))
            if room is not None:
                task.add_done_callback(lambda _: room.release())
            tasks.append(task)
        await asyncio.gather(*tasks)


def answer(ask: Ask, received: Received, stream: bool) -> Answer:
    """The report of what came."""
    usage, times, error = received.usage, received.times, received.error
    if error is None and (usage is None or usage.completion_tokens is None):
        error = "the answer has no usage, so that its tokens cannot be counted"
    if error is None and not times:
        error = "the answer has no choices"
    texts = received.texts
    return Answer(
        index=ask.index,
        sent=received.sent,
        first=times[0] if times else 0.0,
        last=times[-1] if times else perf_counter(),
        chunks=len(times) if stream else 0,
        gaps=packed(gaps(received)) if stream else b"",
        prompt_tokens=usage.prompt_tokens if usage else 0,
        completion_tokens=(usage.completion_tokens or 0) if usage else 0,
        text="".join(part for index in sorted(texts) for part in texts[index]) if texts else None,
        error=error,
    )


def gaps(received: Received) -> list[float]:
    """Seconds between each chunk and the one before it of the same choice."""
    times = received.times
    if not received.choices:
        return [later - earlier for earlier, later in pairwise(times)]
    last: dict[int, float] = {}
    found = []
    for choice, at in zip(received.choices, times, strict=True):
        if choice in last:
            found.append(at - last[choice])
        last[choice] = at
    return found


def packed(values: list[float]) -> bytes:
    """As float64[…]."""
    return np.array(values, "<f8").tobytes()


async def serve(source: BinaryIO, out: BinaryIO) -> None:
    """Rounds until there is nothing more to do. Between them nothing runs, so that reading may block."""
    client: Client | None = None
    asks: list[Ask] = []
    while (data := read(source)) is not None:
        match decode_to_client(data):
            case Setup() as setup:
                client = Client(setup, out)
                await client.open(setup.connections)
                client.say(Connected())
                out.flush()
            case Ask() as ask:
                asks.append(ask)
            case Go() as go:
                assert client is not None
                gc.collect()
                gc.freeze()
                gc.disable()
                await client.run(asks, go)
                gc.enable()
                asks = []


def main() -> None:
    """Speak over stdin and stdout."""
    many_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.stdin.buffer, sys.stdout.buffer))


if __name__ == "__main__":
    main()
