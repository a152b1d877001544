"""Who waits, and in which order."""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from toka.core.ledger import Ledger
from toka.core.sequence import BATCH, Sequence

VESTED = -(1 << 40)
"""The level before all priorities: sequences of the batch lane that start from what their lane is owed."""


class Held:
    """What a tenant has in the queue, the batch lane not counted."""

    __slots__ = ("requests", "sequences", "tokens")

    def __init__(self) -> None:
        self.sequences = 0
        self.requests = 0
        """Those whose first choice is here."""
        self.tokens = 0
        """Of the prompts of all these sequences."""

    def __repr__(self) -> str:
        return f"<Held: {self.requests} requests, {self.sequences} sequences, {self.tokens} tokens>"

    def add(self, sequence: Sequence, sign: int) -> None:
        """It comes, or goes (−1)."""
        self.sequences += sign
        self.requests += sign * (sequence.choice == 0)
        self.tokens += sign * len(sequence.prompt)


NOTHING = Held()


class _Level:
    """The waiting sequences of one priority: a line a tenant, first come, first served."""

    __slots__ = ("lines", "present", "size")

    def __init__(self) -> None:
        self.lines: dict[int, OrderedDict[int, Sequence]] = {}
        self.present: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        """Which accounts have a line."""
        self.size = 0

    def open(self, account: int, accounts: int) -> OrderedDict[int, Sequence]:
        """A line for an account that has none, of so many accounts."""
        if len(self.present) < accounts:
            self.present = np.append(self.present, np.zeros(accounts - len(self.present), dtype=bool))
        self.present[account] = True
        line = self.lines[account] = OrderedDict()
        return line

    def close(self, account: int) -> None:
        """It is empty."""
        del self.lines[account]
        self.present[account] = False

    def walk(self, ledger: Ledger) -> Iterator[Sequence]:
        """In the order in which they would start, if each paid for all of its prompt when it does."""
        if len(self.lines) == 1:
            for line in self.lines.values():
                yield from line.values()
            return
        counters = np.where(self.present, ledger.counters[: len(self.present)], np.inf)
        walks: dict[int, Iterator[Sequence]] = {}
        left = self.size
        while left:
            account = int(counters.argmin())
            walk = walks.get(account)
            if walk is None:
                walk = walks[account] = iter(self.lines[account].values())
            sequence = next(walk, None)
            if sequence is None:
                counters[account] = np.inf
                continue
            yield sequence
            left -= 1
            counters[account] += ledger.price(sequence)


class Queue:
    """Waiting sequences: lower priority numbers first; within a priority, the tenant that has been served least; within
    a tenant first come, first served, but that preempted sequences come before all others of theirs. With one tenant
    that is the order of arrival."""

    __slots__ = ("_held", "_ledger", "_levels")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._levels: dict[int, _Level] = {}
        self._held: dict[str, Held] = {}

    def __len__(self) -> int:
        return sum(level.size for level in self._levels.values())

    def __iter__(self) -> Iterator[Sequence]:
        """In order. The queue must not change meanwhile."""
        for key in sorted(self._levels):
            yield from self._levels[key].walk(self._ledger)

    def __contains__(self, sequence: Sequence) -> bool:
        level = self._levels.get(_level_of(sequence))
        return level is not None and sequence.arrival in level.lines.get(sequence.account, ())

    def __repr__(self) -> str:
        return f"<Queue of {len(self)}>"

    @property
    def batch(self) -> int:
        """How many are of the batch lane."""
        return sum(level.size for key, level in self._levels.items() if key >= BATCH or key == VESTED)

    def held(self, tenant: str) -> Held:
        """What a tenant has here. To be looked at, not kept."""
        return self._held.get(tenant, NOTHING)

    def push(self, sequence: Sequence, *, moved: bool = False) -> None:
        """At the end of its tenant's line. `moved`: it has waited elsewhere, so its tenant does not come back from
        idleness with it."""
        ledger = self._ledger
        sequence.account = account = ledger.account(sequence)
        key = _level_of(sequence)
        level = self._levels.get(key)
        if level is None:
            if key >= BATCH and not moved and not self.batch:
                ledger.forget()
            level = self._levels[key] = _Level()
        line = level.lines.get(account)
        if line is None:
            if not moved:
                ledger.lift(account, ledger.counters[: len(level.present)][level.present])
            line = level.open(account, len(ledger.counters))
        line[sequence.arrival] = sequence
        level.size += 1
        self._count(sequence, 1)

    def push_front(self, sequence: Sequence) -> None:
        """At the head of its tenant's line."""
        self.push(sequence)
        self._levels[_level_of(sequence)].lines[sequence.account].move_to_end(sequence.arrival, last=False)

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out; False if it is not in."""
        key, account = _level_of(sequence), sequence.account
        level = self._levels.get(key)
        line = level.lines.get(account) if level else None
        if level is None or line is None or line.pop(sequence.arrival, None) is None:
            return False
        level.size -= 1
        self._count(sequence, -1)
        self._ledger.left(account)
        if not line:
            level.close(account)
            if not level.size:
                del self._levels[key]
        return True

    def _count(self, sequence: Sequence, sign: int) -> None:
        if sequence.priority < BATCH:
            held = self._held.setdefault(sequence.tenant, Held())
            held.add(sequence, sign)
            if not held.sequences:
                del self._held[sequence.tenant]

    def promote(self) -> None:
        """If the batch lane is owed enough for its next sequence, let that one start before all others."""
        if not self._ledger.owed:
            return
        key = min((key for key in self._levels if key >= BATCH), default=None)
        if key is None:
            return
        sequence = next(self._levels[key].walk(self._ledger))
        if self._ledger.covers(sequence):
            self.remove(sequence)
            self._ledger.vest(sequence)
            self.push(sequence, moved=True)

    def check(self) -> None:
        """Raises AssertionError."""
        for key, level in self._levels.items():
            assert level.size == sum(map(len, level.lines.values())) > 0, "a level miscounted"
            assert np.flatnonzero(level.present).tolist() == sorted(level.lines), "a line that nobody sees"
            for account, line in level.lines.items():
                for arrival, sequence in line.items():
                    assert (_level_of(sequence), sequence.account, sequence.arrival) == (key, account, arrival)
                    assert self._ledger.account(sequence) == account
        waiting = [sequence for sequence in self if sequence.priority < BATCH]
        for tenant in {sequence.tenant for sequence in waiting} | self._held.keys():
            held, own = self.held(tenant), [sequence for sequence in waiting if sequence.tenant == tenant]
            assert held.sequences == len(own) > 0, "a tenant miscounted"
            assert held.requests == sum(sequence.choice == 0 for sequence in own)
            assert held.tokens == sum(len(sequence.prompt) for sequence in own)
        self._ledger.check()


def _level_of(sequence: Sequence) -> int:
    return VESTED if sequence.vested else sequence.priority
