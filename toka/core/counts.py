"""What the schedulers of one replica have done, over all its epochs: plain numbers that only rise."""

from toka.core.blocks import Ints


class Counts:
    """In tokens, but for `preemptions`.

    A sequence's prompt is counted once: what it found in the prefix cache is `cached`, what was run is `computed`. What
    is run again after a preemption is `recomputed`, and neither.
    """

    __slots__ = ("cached", "computed", "generated", "hits", "preemptions", "queries", "recomputed", "shared")

    def __init__(self) -> None:
        self.queries = 0
        """Looked up in the prefix cache, by sequences that start for the first time."""
        self.hits = 0
        """Of these, found."""
        self.computed = 0
        self.cached = 0
        self.recomputed = 0
        self.generated = 0
        """Come back for sequences that had not ended."""
        self.shared = 0
        """Of prefixes, once a step: what a Hydragen group's members did not read because another had."""
        self.preemptions = 0

    def __repr__(self) -> str:
        return f"<Counts {', '.join(f'{name}={getattr(self, name)}' for name in self.__slots__)}>"

    def found(self, prompt: Ints, reached: int, hit: int) -> None:
        """A sequence with this prompt starts, `hit` of whose tokens are cached and `reached` were before."""
        self.cached += max(0, min(hit, len(prompt)) - reached)

    def ran(self, prompt: Ints, reached: int, start: int, end: int) -> None:
        """A chunk is planned: positions [start, end), of which those before `reached` had been run before."""
        again = max(0, min(end, reached) - start)
        self.recomputed += again
        self.computed += max(0, min(end, len(prompt)) - start - again)
