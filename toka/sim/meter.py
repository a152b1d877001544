"""What a simulation measures while it runs, and what it makes of that in the end."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toka.sim.device import Longs
from toka.sim.workload import Floats

FINEST = 1e-5
"""Seconds of the shortest gap between two tokens that is told from none."""
PER_E = 200
"""Bins of a histogram for each factor e: percentiles are right to 0.5 %."""
BINS = 22 * PER_E
QUANTILES = (0.5, 0.9, 0.99)
NEVER = -1.0


class Histogram:
    """Gaps in seconds, in bins of equal ratio: as many as one likes in little room."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: Longs = np.zeros(BINS, dtype=np.int64)

    def add(self, gaps: Floats) -> None:
        """Count some."""
        # Most sequences of a step have waited equally long: count runs, not rows.
        first = gaps[0]
        same = int(np.count_nonzero(gaps == first))
        self._count(np.array([first]), same)
        if same < len(gaps):
            rest = gaps[gaps != first]
            self._count(rest, 1)

    def _count(self, gaps: Floats, times: int) -> None:
        bins = (np.log(np.maximum(gaps, FINEST) / FINEST) * PER_E).astype(np.int64)
        np.add.at(self.counts, np.minimum(bins, BINS - 1), times)

    def quantile(self, share: float) -> float:
        """The gap that this share of all gaps do not exceed; 0 without gaps."""
        cumulative = self.counts.cumsum()
        if cumulative[-1] == 0:
            return 0.0
        index = int(np.searchsorted(cumulative, share * cumulative[-1]))
        return float(FINEST * np.exp((index + 0.5) / PER_E))


class State(NamedTuple):
    """A replica's, or that of all together."""

    used: int = 0
    """Blocks that running sequences refer to."""
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Series:
    """Over the whole seconds of a simulation; float64[seconds] each."""

    used: Floats
    """Blocks that running sequences refer to, the mean over the second."""
    running: Floats
    waiting: Floats
    tokens: Floats
    """Tokens that came back in the second."""
    loaded: NDArray[np.bool_]
    """Somebody waited at each moment of the second."""


class Meter:
    """The clock of all replicas together, and what happened by it. Times never go back."""

    def __init__(self, sequences: int) -> None:
        self.arrived: Floats = np.full(sequences, NEVER)
        self.first: Floats = np.full(sequences, NEVER)
        """When each sequence got its first token."""
        self.ended: Floats = np.full(sequences, NEVER)
        self.gaps = Histogram()
        self.steps = 0
        self.tokens = 0
        self.rows = 0
        self.recomputed = 0
        self.now = 0.0
        self.state = State()
        self._last: Floats = np.full(sequences, NEVER)
        self._areas: list[list[float]] = [[0.0, 0.0, 0.0, 0.0, 1.0]]
        """For each second begun: the integrals of the state, the tokens, and whether somebody always waited."""

    def advance(self, now: float) -> None:
        """Time passes, with the state as it is."""
        while now >= len(self._areas):
            self._pass(float(len(self._areas)))
            self._areas.append([0.0, 0.0, 0.0, 0.0, 1.0])
        self._pass(now)

    def _pass(self, now: float) -> None:
        area, past, state = self._areas[-1], now - self.now, self.state
        if past > 0:
            area[0] += past * state.used
            area[1] += past * state.running
            area[2] += past * state.waiting
            if not state.waiting:
                area[4] = 0.0
            self.now = now

    def change(self, before: State, after: State) -> None:
        """One replica's state is another."""
        self.state = State(*(total - old + new for total, old, new in zip(self.state, before, after, strict=True)))

    def sampled(self, now: float, sequences: Longs) -> None:
        """These got a token each."""
        self.tokens += len(sequences)
        self._areas[-1][3] += len(sequences)
        last = self._last[sequences]
        self._last[sequences] = now
        known = last >= 0
        if known.all():
            if len(last):
                self.gaps.add(now - last)
        else:
            self.first[sequences[~known]] = now
            if known.any():
                self.gaps.add(now - last[known])

    def series(self) -> Series:
        """By whole second; the last, which is not whole, is left out."""
        areas = np.array(self._areas[:-1]).reshape(-1, 5)
        return Series(areas[:, 0], areas[:, 1], areas[:, 2], areas[:, 3], areas[:, 4] > 0)
