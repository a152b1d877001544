"""Who waits, and in which order."""

from collections import OrderedDict
from collections.abc import Iterator

from toka.core.sequence import Sequence


class Queue:
    """Waiting sequences: lower priority numbers first, and within a priority first come, first served, but that
    preempted sequences come before all others of theirs."""

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[int, Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """In order. The queue must not change meanwhile."""
        for priority in sorted(self._levels):
            yield from self._levels[priority].values()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.arrival in self._levels.get(sequence.priority, ())

    def __repr__(self) -> str:
        return f"<Queue of {len(self)}>"

    def push(self, sequence: Sequence) -> None:
        """At the end of its priority."""
        self._levels.setdefault(sequence.priority, OrderedDict())[sequence.arrival] = sequence

    def push_front(self, sequence: Sequence) -> None:
        """At the head of its priority."""
        self.push(sequence)
        self._levels[sequence.priority].move_to_end(sequence.arrival, last=False)

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out; False if it is not in."""
        level = self._levels.get(sequence.priority)
        if level is None or level.pop(sequence.arrival, None) is None:
            return False
        if not level:
            del self._levels[sequence.priority]
        return True
