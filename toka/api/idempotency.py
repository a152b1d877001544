"""Work that several clients wait for: POSTs that carry the same `Idempotency-Key` and the same body run once.

A key lives as long as its request runs. The work is given back when the last client that waits for it has gone.
"""

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from toka.api.aside import aside
from toka.api.broadcast import Broadcast
from toka.api.exchange import Exchange
from toka.api.reply import Tally
from toka.api.weight import INLINE_BYTES
from toka.errors import BadRequest, Conflict
from toka.request import Generation, Listener

MAX_KEY = 255
"""Bytes of a key."""


class Countable(Protocol):
    """A request for the engine that has so many choices."""

    @property
    def choices(self) -> int:
        """How many, in all."""


J = TypeVar("J", bound=Countable)
Prepare = Callable[[bytes, str], Coroutine[Any, Any, list[J]]]
"""From a body, and whose it is, to the requests in it. Raises RequestError."""
Begin = Callable[[J, Listener], Generation | None]
"""Submit one of them; None: it needs no engine and is answered. Raises RequestError."""


class Run(ABC, Generic[J]):
    """The work on one body, as a client sees it who waits inside `with run:`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The client does not wait any more."""

    @abstractmethod
    async def jobs(self) -> list[J]:
        """The requests of the body, once they are checked and tokenized. Raises RequestError."""

    @abstractmethod
    def begin(self, number: int, tally: Tally, listener: Listener) -> None:
        """Let a listener hear one of them, from the start. Raises RequestError."""


class Runs(Generic[J]):
    """All that one endpoint works on under a key."""

    def __init__(self, prepare: Prepare[J], begin: Begin[J]) -> None:
        self._prepare = prepare
        self._begin = begin
        self._shared: dict[tuple[bytes, bytes], Shared[J]] = {}

    def __len__(self) -> int:
        """Keys in use."""
        return len(self._shared)

    async def open(self, exchange: Exchange, limit: int) -> Run[J]:
        """Read a body of at most `limit` bytes. Raises what `read_json` raises, BadRequest and Conflict."""
        key = exchange.header(b"idempotency-key")
        if len(key) > MAX_KEY:
            raise BadRequest(f"The Idempotency-Key is longer than {MAX_KEY} bytes.")
        body = await exchange.read_json(limit)
        if not key:
            return Alone(self._prepare, self._begin, body, exchange.tenant)
        digest = _digest(body) if len(body) <= INLINE_BYTES else await aside(lambda: _digest(body))
        owned = (exchange.header(b"authorization"), key)
        run = self._shared.get(owned)
        if run is None:
            run = Shared(digest, self._prepare(body, exchange.tenant), self._begin, lambda: self._shared.pop(owned))
            self._shared[owned] = run
        elif run.digest != digest:
            raise Conflict(
                "A request with the same Idempotency-Key and another body is running. Use a new key for a new request.",
                code="idempotency_key_in_use",
            )
        return run


class Alone(Run[J]):
    """Work for one client, who begins it and whose reply gives it back."""

    def __init__(self, prepare: Prepare[J], begin: Begin[J], body: bytes, tenant: str) -> None:
        self._prepare = prepare
        self._begin = begin
        self._body = body
        self._tenant = tenant
        self._jobs: list[J] = []

    async def jobs(self) -> list[J]:
        """See Run. To be called once: the body is let go."""
        body, self._body = self._body, b""
        self._jobs = await self._prepare(body, self._tenant)
        return self._jobs

    def begin(self, number: int, tally: Tally, listener: Listener) -> None:
        """See Run. The tally owns the generation."""
        tally.generation = self._begin(self._jobs[number], listener)


class Shared(Run[J]):
    """Work for whoever comes with its key. It goes on while anybody waits."""

    def __init__(
        self, digest: bytes, jobs: Coroutine[Any, Any, list[J]], begin: Begin[J], ended: Callable[[], object]
    ) -> None:
        """`ended` is called once, when the work is done, has failed, or is wanted by nobody."""
        self.digest = digest
        self._begin = begin
        self._ended = ended
        self._clients = 0
        self._over = False
        self._broadcasts: dict[int, Broadcast] = {}
        self._task = asyncio.get_running_loop().create_task(jobs)
        self._task.add_done_callback(self._prepared)

    def __repr__(self) -> str:
        state = "over" if self._over else "running" if self._task.done() else "being prepared"
        return f"<Shared {state}, {self._clients} clients>"

    def __enter__(self) -> Self:
        self._clients += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The last to leave gives everything back."""
        self._clients -= 1
        if self._clients == 0 and not self._over:
            self._task.cancel()
            self._cancel()
            self._end()

    async def jobs(self) -> list[J]:
        """See Run. A client that is cancelled leaves the others their work."""
        return await asyncio.shield(self._task)

    def begin(self, number: int, tally: Tally, listener: Listener) -> None:
        """See Run. The first who calls it submits the request; what has been said already is said at once."""
        job = self._task.result()[number]
        broadcast = self._broadcasts.setdefault(number, Broadcast(job.choices, self._check))
        broadcast.tell(tally, listener)
        if not broadcast.begun:
            broadcast.begun = True
            try:
                broadcast.generation = self._begin(job, broadcast)
            except BaseException:
                broadcast.begun = False
                raise

    def _prepared(self, task: "asyncio.Task[list[J]]") -> None:
        """Those who wait hear of a failure; the key is free."""
        if task.cancelled() or task.exception() is not None:
            self._end()

    def _check(self) -> None:
        broadcasts = self._broadcasts.values()
        if len(broadcasts) == len(self._task.result()) and all(broadcast.over for broadcast in broadcasts):
            self._end()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._ended()

    def _cancel(self) -> None:
        for broadcast in self._broadcasts.values():
            if broadcast.generation is not None:
                broadcast.generation.cancel()


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()
