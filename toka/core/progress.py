"""What is in flight, and what its results bring."""

from typing import NamedTuple

from toka.core.blocks import Ints
from toka.core.sequence import End, Sequence
from toka.wire import Logprobs


class News(NamedTuple):
    """One token of a watched sequence; `end` is set with its last one."""

    sequence: Sequence
    token: int
    end: End | None
    scored: int = -1
    """Where in the step's log-probabilities its own are, if it asked for them."""


class Scored(NamedTuple):
    """Tokens of a sequence's prompt, by their positions in it."""

    sequence: Sequence
    logprobs: Logprobs


class Ended(NamedTuple):
    """A sequence that nobody watched is over; `tokens` is all it generated, int32, the ending token included."""

    sequence: Sequence
    end: End
    tokens: Ints


class Work(NamedTuple):
    """What one step ran, and whom it was for."""

    prefilled: int
    """Tokens of chunks."""
    decoded: int
    """Sequences that had decoded or been filled before it."""
    continued: int
    """Of these, those that had not ended. Their last tokens came with the step before."""
    begun: list[Sequence]
    """Sequences that were filled with this step: this is their first token since they took their seat."""


class Progress(NamedTuple):
    """What one step brought."""

    news: list[News]
    ended: list[Ended]
    scored: list[Scored]
    work: Work
    logprobs: Logprobs | None = None
    """Of the sampled tokens; see `News.scored`."""


class Diverged(Exception):
    """The worker's results do not fit the plans: nothing that comes after can be trusted, the epoch must end."""


class Flight(NamedTuple):
    """A plan in flight: its step and, by row, the seats that its results are for."""

    step: int
    roster: Ints
    chunks: list[Sequence]
    """Whose chunks the plan has, in order."""
    prefilled: int
    """Tokens of these chunks."""
    filled: int
    """Rows at the head of the roster whose sequences are filled with this step; the others decode."""
