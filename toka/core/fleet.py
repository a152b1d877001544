"""Several replicas behind one queue."""

from collections.abc import Callable
from functools import partial

import numpy as np

from toka.core.admission import Policy
from toka.core.hydragen import Groups
from toka.core.ledger import Ledger
from toka.core.limits import Limits
from toka.core.progress import Progress
from toka.core.prompt import Prompt
from toka.core.queue import Queue
from toka.core.router import Longs, Router
from toka.core.scheduler import Scheduler
from toka.core.sequence import End, Sequence
from toka.wire import Plan, Tokens

SHORT = 8
"""Sequences that may wait at a replica. The others wait in the common queue, where they can still go anywhere."""
FAR = 1 << 60
"""The load of a replica that takes nobody."""
DECODE_WEIGHT = 8
"""What a decoding sequence counts for in a replica's load, in tokens of prompt."""


class Fleet:
    """Schedulers of equal replicas. A sequence goes to one of them only when it is about to start, so that it finds the
    blocks that are there by then, and the shortest queue."""

    def __init__(
        self,
        replicas: int,
        limits: Limits,
        key: bytes = b"",
        policy: Policy | None = None,
        groups: Callable[[], Groups] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """`groups` makes each replica's own."""
        self.ledger = ledger or Ledger()
        self.router = Router(replicas, limits.page_size)
        self.schedulers = [
            Scheduler(
                limits,
                epoch=replica + 1,
                key=key,
                policy=policy,
                groups=groups() if groups else None,
                named=partial(self.router.named, replica),
                ledger=self.ledger,
            )
            for replica in range(replicas)
        ]
        self._queue = Queue(self.ledger)
        self._load: Longs = np.zeros(replicas, dtype=np.int64)
        self._open: Longs = np.zeros(replicas, dtype=np.int64)
        self._home: dict[Sequence, int] = {}
        self._cost: dict[int, int] = {}
        self._last: tuple[Prompt | None, int] = (None, 0)
        self._arrivals = 0

    def __repr__(self) -> str:
        return f"<Fleet of {len(self.schedulers)}: {len(self._queue)} waiting for a place>"

    @property
    def waiting(self) -> int:
        """Sequences that have not started."""
        return len(self._queue) + sum(scheduler.waiting for scheduler in self.schedulers)

    def fits(self, sequence: Sequence) -> bool:
        """Whether a replica could run the sequence to its limit."""
        return self.schedulers[0].fits(sequence)

    def submit(self, sequence: Sequence) -> None:
        """Put a sequence at the end of its tenant's line in the queue. It must fit."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._queue.push(sequence)

    def finish(self, sequence: Sequence, end: End) -> None:
        """End a sequence from outside. Harmless after its end."""
        if self._queue.remove(sequence):
            sequence.end = end
        elif (replica := self._leave(sequence)) is not None:
            self.schedulers[replica].finish(sequence, end)
            self._weigh(replica)

    def dispatch(self) -> set[int]:
        """Give sequences from the queue's head a place, as long as some replica has few who wait. Returns the replicas
        that got some."""
        touched: set[int] = set()
        self._queue.promote()
        while len(self._queue) and self._open.min() < SHORT:
            sequence = next(iter(self._queue))
            self._queue.remove(sequence)
            names = self.schedulers[0].tree.digests(sequence.prompt)
            # A replica whose own queue is long enough gets nobody, whatever it holds.
            load = np.where(self._open < SHORT, self._load, FAR)
            soon = self._last[1] if sequence.prompt is self._last[0] else None
            replica, tokens = self.router.place(names, len(sequence.prompt), load, soon)
            self._last = (sequence.prompt, replica)
            self._home[sequence] = replica
            self._cost[sequence.arrival] = tokens
            # Now, since the next to be dispatched depends on it; the replica knows better, but only later.
            self.ledger.bill(sequence, tokens)
            self.schedulers[replica].take(sequence)
            self._load[replica] += tokens
            self._open[replica] += 1
            touched.add(replica)
        return touched

    def plan(self, replica: int) -> Plan | None:
        """The next step of one replica. `dispatch` comes first."""
        plan = self.schedulers[replica].plan()
        self._weigh(replica)
        return plan

    def apply(self, replica: int, tokens: Tokens) -> Progress:
        """Take in the results of a replica's oldest plan in flight. Raises Diverged."""
        progress = self.schedulers[replica].apply(tokens)
        over = [news.sequence for news in progress.news if news.end] + [ended.sequence for ended in progress.ended]
        for sequence in over:
            self._leave(sequence)
        self._weigh(replica)
        return progress

    def _leave(self, sequence: Sequence) -> int | None:
        """A sequence is over; returns where it was."""
        self._cost.pop(sequence.arrival, None)
        return self._home.pop(sequence, None)

    def _weigh(self, replica: int) -> None:
        """Look anew at what a replica has to do: nothing is added up here that could drift."""
        scheduler = self.schedulers[replica]
        begun, waiting = scheduler.unfilled
        ahead = sum(self._cost.get(sequence.arrival, len(sequence.prompt)) for sequence in waiting)
        self._load[replica] = begun + ahead + DECODE_WEIGHT * scheduler.running
        self._open[replica] = len(waiting)

    def check(self) -> None:
        """Prove that the books balance, those of each replica and those between them. Raises AssertionError."""
        held: dict[bytes, set[int]] = {}
        for replica, scheduler in enumerate(self.schedulers):
            scheduler.check()
            for name in scheduler.tree.names():
                held.setdefault(name, set()).add(replica)
            assert self._open[replica] == scheduler.waiting
        assert held == {name: self.router.holders(name) for name in held}
        assert len(self.router) == len(held), "the router knows a block that nobody holds"
        for sequence, replica in self._home.items():
            assert sequence.end is None
            assert self.schedulers[replica].has(sequence)
