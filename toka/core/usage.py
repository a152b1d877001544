"""The future of the KV cache: how many blocks will be in use at each of the coming steps.

Between its start and its end a sequence only ever takes blocks: one at each multiple of the page size. So its use over
time is known as soon as its end is, and the sum over all sequences is a curve that can be kept up to date with a few
array operations whenever a sequence starts, ends or turns out longer than predicted.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.int64]
HORIZON = 4096
"""Steps that the curve looks ahead. What comes after is not looked at."""


class Future(NamedTuple):
    """What one sequence is predicted to use. Steps are absolute."""

    blocks: int
    """Blocks that it has, or takes when it starts, and gives back at its end."""
    grows: int
    """The step that takes the first further block; each page of steps takes another."""
    end: int
    """The first step at which it has nothing any more."""
    page: int
    borrowed: tuple[tuple[int, int], ...] = ()
    """(step, count): blocks shared with a sequence that gives them up at `step`, and held until `end` by this one."""

    def over(self, start: int, stop: int) -> Curve:
        """Blocks in use at the steps start … min(stop, end) − 1, int64[steps]; after that there are none."""
        steps = np.arange(start, max(min(stop, self.end), start))
        used: Curve = self.blocks + np.maximum((steps - self.grows) // self.page + 1, 0)
        for step, count in self.borrowed:
            used[max(step - start, 0) :] += count
        return used


class Usage:
    """The curve. It is the sum of the futures; `ahead` and `peak` lift it to the blocks that are in use now, so that
    what belongs to nobody's future (shared blocks whose holder left early) counts as staying in use. Where two futures
    claim the same block for a while, the curve is too high, never too low."""

    __slots__ = ("_level", "_origin", "_span", "now")

    def __init__(self, span: int) -> None:
        """`span`: no future ends later than this many steps after it is added."""
        self.now = 0
        self._span = max(span, HORIZON)
        self._origin = 0
        self._level: Curve = np.zeros(2 * self._span, dtype=np.int64)

    def advance(self, now: int) -> None:
        """The present is step `now`; it never goes back."""
        self._origin += now - self.now
        self.now = now
        if self._origin > self._span:
            rest = self._level[self._origin :].copy()
            self._level[:] = 0
            self._level[: len(rest)] = rest
            self._origin = 0

    def add(self, future: Future) -> None:
        """A sequence starts, or goes on differently."""
        used = future.over(self.now, self.now + self._span)
        self._level[self._origin : self._origin + len(used)] += used

    def remove(self, future: Future) -> None:
        """What was added is no longer true from now on."""
        used = future.over(self.now, self.now + self._span)
        self._level[self._origin : self._origin + len(used)] -= used

    def ahead(self, used: int) -> Curve:
        """Blocks in use now and at the coming steps, int64[HORIZON], when `used` are in use now."""
        level = self._level[self._origin : self._origin + HORIZON]
        lifted: Curve = level + max(used - level[0], 0)
        return lifted

    def peak(self, used: int, future: Future) -> int:
        """The most blocks that will be in use at once if `future` is added, when `used` are in use now."""
        ahead = self.ahead(used)
        mine = future.over(self.now, self.now + HORIZON)
        ahead[: len(mine)] += mine
        return int(ahead.max())


def future_of(
    *,
    start: int,
    length: int,
    row: int,
    steps: int,
    page: int,
    blocks: int | None = None,
    borrowed: tuple[tuple[int, int], ...] = (),
) -> Future:
    """The future of a sequence that decodes from step `start` on for `steps` steps, and by then has `length` tokens in
    a row of `row` blocks. `blocks` of these (all, if not said) nobody else answers for."""
    return Future(
        blocks=row if blocks is None else blocks,
        grows=start + row * page - length,
        end=start + steps,
        page=page,
        borrowed=borrowed,
    )
