"""Client processes together: requests are dealt out to them, answers gathered, and how they fared themselves is judged.

One Python process takes some 100,000 chunks a second at most, so there are several where streams are many. Each has its
share of the requests and of the concurrency. Nothing is pickled: the pipes carry `bench/messages.py`.
"""

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import IO, NamedTuple, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.messages import Answer, Ask, Connected, Finished, FromClient, Go, Setup, decode_from_client, read, write
from toka.errors import StartError

STREAMS = 256
"""Streams that one client process takes on, and more of whole answers."""
WHOLE = 2048
SHARE = 4
"""Of so many cores, one is for a client: the server needs the others."""
HEAD_START = 0.05
"""Seconds between the last request's way into the pipe and the start."""
LATE = 0.005
BUSY = 0.9
"""Above either, what was measured is the client."""
TELLING = 0.5
"""Seconds that a round must take for that to say anything."""


class Round(NamedTuple):
    """What came of some requests."""

    answers: list[Answer]
    """In the order of the requests."""
    health: "Health"


class Health(NamedTuple):
    """How the clients fared themselves."""

    clients: int
    busy: float
    """Share of its time that the busiest one's CPU was at work."""
    lag: float
    """Seconds that an event loop was late: the 99th percentile over all looks at the worst client."""
    cpu: float
    """Seconds of CPU of all of them."""
    seconds: float
    """How long they were at it."""

    @property
    def warning(self) -> str | None:
        """A line, if the client was the bottleneck, so that the figures are the client's and not the server's."""
        if self.seconds < TELLING or (self.lag <= LATE and self.busy <= BUSY):
            return None
        return (
            f"WARNING: the client was the bottleneck (event loop {1000 * self.lag:.1f} ms late at the 99th percentile,"
            f" CPU {100 * self.busy:.0f} % busy): take more clients (num_clients={self.clients + 1}), or a machine with"
            " free cores"
        )


class Clients:
    """Client processes that have connected. Used as a context; they are gone when it is left."""

    def __init__(self, setup: Setup, count: int) -> None:
        self._setup = setup
        self._inbox: SimpleQueue[tuple[int, FromClient | None]] = SimpleQueue()
        command = [sys.executable, str(Path(__file__).with_name("client.py"))]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)
        ]
        self._readers = [
            Thread(target=self._listen, args=(number, process.stdout), daemon=True)
            for number, process in enumerate(self._processes)
        ]

    def __enter__(self) -> Self:
        for reader in self._readers:
            reader.start()
        for process in self._processes:
            assert process.stdin
            write(process.stdin, self._setup)  # type: ignore[arg-type]  # IO[bytes] that is a BinaryIO
            process.stdin.flush()
        for _ in self._processes:
            if not isinstance(self._next(), Connected):
                raise StartError("a client process did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            assert process.stdin
            if kind is not None:
                process.kill()
            with contextlib.suppress(BrokenPipeError):  # it may have ended already
                process.stdin.close()
        for process in self._processes:
            process.wait()
        for reader in self._readers:
            reader.join()

    def run(
        self, asks: Sequence[Ask], *, concurrency: int | None = None, wave: bool = False, bar: "Bar | None" = None
    ) -> Round:
        """Send these requests and wait for all answers. Raises StartError if a client ends."""
        # A wave ends when all of it has, which only one process can know.
        many = 1 if wave else min(len(self._processes), concurrency or len(asks), len(asks))
        for number, process in enumerate(self._processes[:many]):
            assert process.stdin
            for ask in asks[number::many]:
                write(process.stdin, ask)  # type: ignore[arg-type]
        start = time.perf_counter() + HEAD_START + 2e-6 * len(asks)
        for number, process in enumerate(self._processes[:many]):
            assert process.stdin
            share = len(range(number, concurrency, many)) if concurrency else 0
            write(process.stdin, Go(at=start, concurrency=share, wave=wave))  # type: ignore[arg-type]
            process.stdin.flush()
        answers: dict[int, Answer] = {}
        finished: list[Finished] = []
        while len(finished) < many:
            match self._next():
                case Answer() as answer:
                    answers[answer.index] = answer
                    if bar is not None:
                        bar.advance(answer.completion_tokens)
                case Finished() as one:
                    finished.append(one)
                case other:
                    raise StartError(f"a client process said {other} within a round")
        return Round([answers[ask.index] for ask in asks], health(finished))

    def _next(self) -> FromClient:
        number, message = self._inbox.get()
        if message is None:
            raise StartError(f"client process {number} ended with exit code {self._processes[number].wait()}")
        return message

    def _listen(self, number: int, stdout: IO[bytes] | None) -> None:
        assert stdout
        with stdout, contextlib.suppress(EOFError):
            while (data := read(stdout)) is not None:  # type: ignore[arg-type]
                self._inbox.put((number, decode_from_client(data)))
        self._inbox.put((number, None))


class Bar:
    """A progress bar on stderr where that is a terminal, and otherwise nothing."""

    def __init__(self, total: int, shown: bool = True) -> None:
        self._tokens = 0
        self._started = time.perf_counter()
        self._progress = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rate]}"),
            console=Console(stderr=True),
            disable=not (shown and sys.stderr.isatty()),
            transient=True,
            refresh_per_second=5,
        )
        self._task = self._progress.add_task("", total=total, rate="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, tokens: int) -> None:
        """One request more has ended, with so many tokens."""
        self._tokens += tokens
        rate = self._tokens / (time.perf_counter() - self._started)
        self._progress.update(self._task, advance=1, rate=f"{rate:,.0f} tok/s")


def health(finished: Sequence[Finished]) -> Health:
    """The worst of each figure."""
    lags = [np.frombuffer(one.lags) for one in finished]
    return Health(
        clients=len(finished),
        busy=max(one.cpu / max(one.wall, 1e-9) for one in finished),
        lag=max((float(np.percentile(late, 99)) for late in lags if len(late)), default=0.0),
        cpu=sum(one.cpu for one in finished),
        seconds=max(one.wall for one in finished),
    )


def count(streams: int, stream: bool) -> int:
    """How many client processes so many requests at a time are worth on this machine."""
    wanted = math.ceil(streams / (STREAMS if stream else WHOLE))
    return max(1, min(wanted, len(os.sched_getaffinity(0)) // SHARE))
