"""Log-probabilities on their way from the worker to whoever asked for them: arrays, cut and joined as they came."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from toka.wire import Logprobs


class Score(NamedTuple):
    """What the model thought of one token: natural logarithms of probabilities."""

    logprob: float
    top: list[tuple[int, float]]
    """The most probable tokens in its place, (id, logprob), in falling order."""
    rank: int = 0
    """Its place among all tokens, from 1; 0: not told."""


class Arrays(Protocol):
    """What `wire.Logprobs` and `Scores` have in common: little-endian numbers of n tokens."""

    @property
    def width(self) -> int:
        """Most probable tokens in each place."""

    @property
    def chosen(self) -> bytes | bytearray:
        """float32[n]: log-probabilities of the tokens themselves."""

    @property
    def ids(self) -> bytes | bytearray:
        """int32[n, width]: the most probable tokens."""

    @property
    def values(self) -> bytes | bytearray:
        """float32[n, width]: their log-probabilities."""

    @property
    def ranks(self) -> bytes | bytearray:
        """int32[n]: places of the tokens themselves among all, from 1; empty where they are not told."""


@dataclass(slots=True)
class Scores:
    """Log-probabilities of consecutive tokens of a text, a row each, as in `Arrays`. Grows at its end."""

    width: int
    chosen: bytearray = field(default_factory=bytearray)
    ids: bytearray = field(default_factory=bytearray)
    values: bytearray = field(default_factory=bytearray)
    ranks: bytearray = field(default_factory=bytearray)

    def __len__(self) -> int:
        return len(self.chosen) // 4

    def add(self, sent: Logprobs, row: int) -> None:
        """One row of what a worker sent, which may be wider."""
        self.chosen += sent.chosen[4 * row : 4 * row + 4]
        self.ranks += sent.ranks[4 * row : 4 * row + 4]
        start = 4 * row * sent.width
        end = start + 4 * self.width
        self.ids += sent.ids[start:end]
        self.values += sent.values[start:end]

    def extend(self, more: Arrays, first: int = 0) -> None:
        """All rows from `first` on of others, of the same width."""
        assert more.width == self.width
        self.chosen += more.chosen[4 * first :]
        self.ranks += more.ranks[4 * first :]
        self.ids += more.ids[4 * first * self.width :]
        self.values += more.values[4 * first * self.width :]

    def split(self, count: int) -> "tuple[Scores, Scores]":
        """The first `count` rows, and the rest."""
        one, row = 4 * count, 4 * count * self.width
        return (
            Scores(self.width, self.chosen[:one], self.ids[:row], self.values[:row], self.ranks[:one]),
            Scores(self.width, self.chosen[one:], self.ids[row:], self.values[row:], self.ranks[one:]),
        )

    def narrowed(self, width: int) -> "Scores":
        """At most so many most probable tokens in each place."""
        if width >= self.width:
            return self
        return Scores(width, self.chosen, self._columns(self.ids, width), self._columns(self.values, width), self.ranks)

    def _columns(self, data: bytearray, count: int) -> bytearray:
        return bytearray(np.frombuffer(data, "<i4").reshape(-1, self.width)[:, :count].tobytes())

    def mean(self) -> float:
        """Of the tokens' own log-probabilities; 0 if there are none."""
        return float(np.frombuffer(self.chosen, "<f4").mean(dtype=np.float64)) if self.chosen else 0.0

    def tolist(self) -> list[Score]:
        """A Score a row."""
        count = len(self)
        ids = np.frombuffer(self.ids, "<i4").reshape(count, self.width).tolist()
        values = np.frombuffer(self.values, "<f4").reshape(count, self.width).tolist()
        chosen = np.frombuffer(self.chosen, "<f4").tolist()
        ranks = np.frombuffer(self.ranks, "<i4").tolist() if self.ranks else [0] * count
        return [
            Score(own, list(zip(best, theirs, strict=True)), rank)
            for own, best, theirs, rank in zip(chosen, ids, values, ranks, strict=True)
        ]


def joined_scores(parts: list[Scores | None]) -> Scores | None:
    """Rows of several, one after the other; None: there are none."""
    there = [part for part in parts if part is not None]
    if len(there) < 2:
        return there[0] if there else None
    whole = Scores(there[0].width)
    for part in there:
        whole.extend(part)
    return whole
