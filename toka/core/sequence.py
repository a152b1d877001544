"""One sample of one prompt, and what became of it."""

from enum import Enum

import numpy as np

from toka.core.blocks import Ints
from toka.core.prompt import Prompt
from toka.wire import MAX_STOP_IDS, Sampling

NO_SEAT = -1
BATCH = 1 << 20
"""Priorities from here on are the batch lane: work that nobody waits for. It fills what the others leave, and gives way
as soon as one of them finds no room."""


class End(Enum):
    """Why a sequence is over."""

    STOP = "stop"
    """It sampled one of its stop ids, or the engine saw a stop string."""
    LENGTH = "length"
    """It has all the tokens it may have."""
    CANCELLED = "cancelled"
    """Nobody waits for it any more."""


class Sequence:
    """What a sequence is (fixed) and where it is (the scheduler's business).

    While it runs, its counts live in `Seats` under `seat`; what it generated before the present seat, and what no
    longer fits the seat's row of tokens, is in `chunks`. `cached` is how many tokens of its prompt were in the prefix
    cache when it first started, and `names` what the tree calls the full blocks of `fill`. `starts` counts its seats,
    and `reached` is how many of its tokens were in the KV cache when it last lost one. `account` is its tenant's in its
    lane, by the ledger, which has `billed` its prompt; `vested`: of the batch lane, and the lane's share pays for it.
    """

    __slots__ = (
        "account",
        "arrival",
        "billed",
        "cached",
        "choice",
        "chunks",
        "end",
        "limit",
        "names",
        "owner",
        "priority",
        "prompt",
        "reached",
        "sampling",
        "seat",
        "seed",
        "starts",
        "stops",
        "tenant",
        "uncached",
        "vested",
        "watched",
    )

    def __init__(
        self,
        prompt: Prompt,
        *,
        limit: int,
        owner: object = None,
        watched: bool = False,
        uncached: bool = False,
        priority: int = 0,
        tenant: str = "",
        stops: tuple[int, ...] = (),
        seed: int = 0,
        choice: int = 0,
        sampling: Sampling = Sampling(),  # noqa: B008 - it is frozen
    ) -> None:
        """`limit`: new tokens, at least one. `watched`: every step's token is reported, not only the end. `owner` is
        handed back with every report. `uncached`: all of its prompt must be run. `priority`: lower numbers start first
        and are preempted last. `tenant`: whose it is."""
        assert limit > 0
        assert len(stops) <= MAX_STOP_IDS
        self.prompt = prompt
        self.limit = limit
        self.owner = owner
        self.watched = watched
        self.uncached = uncached
        self.priority = priority
        self.tenant = tenant
        self.stops = stops
        self.seed = seed
        self.choice = choice
        self.sampling = sampling
        self.seat = NO_SEAT
        self.arrival = -1
        self.account = -1
        self.billed = False
        self.vested = False
        self.end: End | None = None
        self.cached = 0
        self.starts = 0
        self.reached = 0
        self.names: list[bytes] = []
        self.chunks: list[Ints] = []

    def __repr__(self) -> str:
        where = self.end.value if self.end else "waiting" if self.seat == NO_SEAT else f"seat {self.seat}"
        return f"<Sequence {self.arrival}: {len(self.prompt)} + {self.limit} tokens, {where}>"

    @property
    def longest(self) -> int:
        """Tokens in the KV cache if it runs to its limit. The last token sampled is never run."""
        return len(self.prompt) + self.limit - 1

    @property
    def kept(self) -> int:
        """Generated tokens in `chunks`."""
        return sum(map(len, self.chunks))

    def fill(self) -> Ints:
        """What must be in the KV cache before the next token is sampled: the prompt and all in `chunks`, int32."""
        return np.concatenate([self.prompt.ids, *self.chunks]) if self.chunks else self.prompt.ids
