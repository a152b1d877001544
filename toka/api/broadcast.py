"""One answer, heard by several: everything that was said, for whoever comes late."""

from collections.abc import Callable

from toka.api.relay import joined
from toka.api.reply import Tally
from toka.errors import RequestError
from toka.request import Delta, Generation, Listener

WIDTH = 64
"""Deltas that are joined to one, and so many of those again."""


class Broadcast:
    """A Listener for many. Whoever comes late hears first what has been said, as one delta a choice."""

    def __init__(self, choices: int, ended: Callable[[], None]) -> None:
        """`ended` is called when the last choice ends, and when they fail."""
        self.generation: Generation | None = None
        self.begun = False
        """It has been submitted."""
        self._open = choices
        self._ended = ended
        self._past: dict[int, Past] = {}
        self._failure: RequestError | None = None
        self._listeners: list[Listener] = []

    @property
    def over(self) -> bool:
        """Nothing more will be said."""
        return self._open == 0 or self._failure is not None

    def tell(self, tally: Tally, listener: Listener) -> None:
        """Everything so far, and from now on what comes, until the tally's generation is cancelled."""
        tally.generation = Seat(self, listener)
        self._listeners.append(listener)
        if self._past:
            listener.deliver([past.joined() for past in self._past.values()])
        if self._failure is not None:
            listener.fail(self._failure)

    def leave(self, listener: Listener) -> None:
        """Tell it no more. Harmless the second time."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def deliver(self, deltas: list[Delta]) -> None:
        """See Listener."""
        for delta in deltas:
            self._past.setdefault(delta.index, Past()).add(delta)
            self._open -= delta.finish_reason is not None
        for listener in tuple(self._listeners):
            listener.deliver(deltas)
        if self._open == 0:
            self._ended()

    def fail(self, error: RequestError) -> None:
        """See Listener."""
        self._failure = error
        for listener in tuple(self._listeners):
            listener.fail(error)
        self._ended()


class Seat:
    """A Generation that belongs to others as well: to cancel it is to leave."""

    def __init__(self, broadcast: Broadcast, listener: Listener) -> None:
        self._broadcast = broadcast
        self._listener = listener

    @property
    def cached_tokens(self) -> int:
        """See Generation."""
        generation = self._broadcast.generation
        return 0 if generation is None else generation.cached_tokens

    def cancel(self) -> None:
        """See Generation."""
        self._broadcast.leave(self._listener)


class Past:
    """All deltas of one choice, joined as they grow in number: what is kept is the answer, and each token was copied
    no more often than the logarithm of their number says."""

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        self._levels: list[list[Delta]] = []
        """The last ones come first; a delta of a level is WIDTH of the level before."""

    def add(self, delta: Delta, level: int = 0) -> None:
        """The next delta."""
        if level == len(self._levels):
            self._levels.append([])
        row = self._levels[level]
        row.append(delta)
        if len(row) == WIDTH:
            self._levels[level] = []
            self.add(joined(row), level + 1)

    def joined(self) -> Delta:
        """All of them as one; there must be one."""
        return joined([delta for row in reversed(self._levels) for delta in row])
