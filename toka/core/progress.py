"""What is in flight, and what its results bring."""

from typing import NamedTuple

import numpy as np

from toka.core.blocks import Ints
from toka.core.sequence import End, Sequence
from toka.wire import Logprobs


class Score(NamedTuple):
    """What the model thought of one token: natural logarithms of probabilities."""

    logprob: float
    top: list[tuple[int, float]]
    """The most probable tokens in its place, (id, logprob), in falling order."""


class News(NamedTuple):
    """One token of a watched sequence; `end` is set with its last one, `score` if it asked for log-probabilities."""

    sequence: Sequence
    token: int
    end: End | None
    score: Score | None = None


class Scored(NamedTuple):
    """Tokens of a sequence's prompt, by their positions in it."""

    sequence: Sequence
    scores: list[tuple[int, Score]]


class Ended(NamedTuple):
    """A sequence that nobody watched is over; `tokens` is all it generated, int32, the ending token included."""

    sequence: Sequence
    end: End
    tokens: Ints


class Progress(NamedTuple):
    """What one step brought."""

    news: list[News]
    ended: list[Ended]
    scored: list[Scored]


class Diverged(Exception):
    """The worker's results do not fit the plans: nothing that comes after can be trusted, the epoch must end."""


class Flight(NamedTuple):
    """A plan in flight: its step and, by row, the seats that its results are for."""

    step: int
    roster: Ints
    chunks: list[Sequence]
    """Whose chunks the plan has, in order."""


def unpack_scores(logprobs: Logprobs) -> list[tuple[int, Score]]:
    """(row or position, score) of each token in `logprobs`."""
    width = logprobs.width
    rows = np.frombuffer(logprobs.rows, "<i4").tolist()
    chosen = np.frombuffer(logprobs.chosen, "<f4").tolist()
    ids = np.frombuffer(logprobs.ids, "<i4").reshape(len(rows), width).tolist()
    values = np.frombuffer(logprobs.values, "<f4").reshape(len(rows), width).tolist()
    return [
        (row, Score(own, list(zip(best, theirs, strict=True))))
        for row, own, best, theirs in zip(rows, chosen, ids, values, strict=True)
    ]
