"""How long will a sequence become? Learned from those that ended, and from those that have not.

Clients ask for far more tokens than answers have, so a batch planned by `max_tokens` leaves most of the cache empty.
What is learned is the share of `max_tokens` that answers use. Averaging over the finished would be wrong: the short
ones finish first, so early on every finished answer is short. The estimator is that of Kaplan and Meier (1958): the
chance to end in a bin of the share is the number of ends in it over the number of sequences that were there to end,
those still running included; survival is the product of the chances not to end.
"""

import numpy as np
from numpy.typing import NDArray

from toka.core.blocks import Ints

Floats = NDArray[np.float64]
BINS = 64
PRIOR = 1.0
"""Sequences that are taken to have used all of their max_tokens, before anything is known."""
MEMORY = 4096.0
"""Ended sequences after which the older half of the evidence is halved."""
REFRESH = 32
"""Steps between two looks at the running sequences, once enough have ended."""
EARLY = 4
"""Steps between two looks while every end is news."""
ENOUGH = 512
"""Ended sequences from which one more changes little."""


class Predictor:
    """Predicted totals of generated tokens."""

    __slots__ = ("_ends", "_expected", "_learning", "_passed")

    def __init__(self, learning: bool = True) -> None:
        """Without `learning` every sequence is predicted to use all of its max_tokens."""
        self._learning = learning
        self._ends: Floats = np.zeros(BINS)
        self._passed: Floats = np.zeros(BINS)
        self._expected: Floats = np.ones(BINS + 1)

    @property
    def pause(self) -> int:
        """Steps to let pass before the next `look`."""
        return EARLY if self._passed[0] < ENOUGH else REFRESH

    def ended(self, generated: int, limit: int) -> None:
        """A sequence ended by itself, or reached its limit, after `generated` of `limit` tokens."""
        index = min(generated * BINS // limit, BINS - 1)
        self._ends[index] += 1
        self._passed[: index + 1] += 1
        if self._passed[0] > MEMORY:
            self._ends /= 2
            self._passed /= 2

    def look(self, generated: Ints, limit: Ints) -> None:
        """Learn from the running sequences, which have `generated` of `limit` tokens each."""
        if not self._learning:
            return
        index = np.minimum(generated.astype(np.int64) * BINS // limit, BINS - 1)
        # A running sequence was there to end in each bin that it has left behind.
        left_behind = np.bincount(index, minlength=BINS)[::-1].cumsum()[::-1]
        at_risk = self._passed + np.append(left_behind[1:], 0) + PRIOR
        stay = 1 - self._ends / at_risk
        # survival[b]: the chance to enter bin b. Ends in the last bin are those that use everything.
        survival = np.cumprod(np.concatenate([[1.0], stay[:-1]]))
        tail = survival[::-1].cumsum()[::-1]
        expected = np.arange(BINS) / BINS + (tail / np.maximum(survival, 1e-12)) / BINS
        self._expected = np.append(np.minimum(expected, 1.0), 1.0)

    def predict(self, generated: int, limit: int) -> int:
        """The total that a sequence with `generated` of `limit` tokens is expected to reach, more than it has."""
        share = self._expected[min(generated * BINS // limit, BINS - 1)]
        return min(max(int(np.ceil(share * limit)), generated + 1), limit)
