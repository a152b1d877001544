"""The running sequences' state, as arrays over seats.

A seat is the place in these arrays that a sequence has from its admission until its last result is in. It is not the
slot: the slot, the place in the worker's state, is given up as soon as the sequence's last step is planned, while the
results of that and earlier steps are still to come.
"""

import numpy as np
from numpy.typing import NDArray

from toka.core.blocks import Ints
from toka.core.sequence import BATCH, NO_SEAT, Sequence
from toka.core.usage import Future
from toka.wire import MAX_STOP_IDS

Flags = NDArray[np.bool_]
ROW = 512
"""Generated tokens that a seat holds before they are moved to the sequence's chunks."""
NO_SLOT = -1
NO_STOP = -2
"""Pads a row of stop ids; no token is ever this."""


class Seats:
    """Columns of state; row i belongs to the sequence in seat i.

    alive      a result for this seat counts
    slot       the worker's slot, or NO_SLOT once it is given up
    fill       tokens that must be in the KV cache before it decodes
    filled     of these, those that are cached or whose prefill is planned
    length     tokens whose keys and values are planned
    blocks     blocks owned, alone or shared; their ids are the first entries of `table`
    published  blocks of the row that the prefix tree has seen
    scheduled  generated tokens planned, those of earlier seats included
    returned   generated tokens come back, those of earlier seats included
    flying     planned rows whose result is not in yet
    limit      generated tokens at which the sequence is over
    kept       generated tokens that are in the sequence's chunks, not in `tokens`
    stops      stop ids, padded with NO_STOP
    watched    every token is reported
    batch      it is of the batch lane, and gives way
    account    its tenant's, in the ledger
    open_ended a stop id may end it before its limit
    end        the step at which it is predicted to have given everything back
    lent       blocks of the row that another sequence answers for on the usage curve
    """

    def __init__(self, count: int, max_blocks: int) -> None:
        """`count` seats for sequences of up to `max_blocks` blocks."""

        self.count = count
        self.alive = np.zeros(count, dtype=bool)
        self.watched = np.zeros(count, dtype=bool)
        self.batch = np.zeros(count, dtype=bool)
        self.account: Ints = np.zeros(count, dtype=np.int32)
        self.open_ended = np.zeros(count, dtype=bool)
        self.end: NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self.lent: Ints = np.zeros(count, dtype=np.int32)
        self.slot: Ints = np.full(count, NO_SLOT, dtype=np.int32)
        self.filled: Ints = np.zeros(count, dtype=np.int32)
        self.fill: Ints = np.zeros(count, dtype=np.int32)
        self.length: Ints = np.zeros(count, dtype=np.int32)
        self.blocks: Ints = np.zeros(count, dtype=np.int32)
        self.published: Ints = np.zeros(count, dtype=np.int32)
        self.scheduled: Ints = np.zeros(count, dtype=np.int32)
        self.returned: Ints = np.zeros(count, dtype=np.int32)
        self.flying: Ints = np.zeros(count, dtype=np.int32)
        self.limit: Ints = np.zeros(count, dtype=np.int32)
        self.kept: Ints = np.zeros(count, dtype=np.int32)
        self.stops: Ints = np.full((count, MAX_STOP_IDS), NO_STOP, dtype=np.int32)
        self.table: Ints = np.zeros((count, max_blocks), dtype=np.int32)
        self.tokens: Ints = np.zeros((count, ROW), dtype=np.int32)
        self.sequences: list[Sequence | None] = [None] * count
        self.futures: list[Future | None] = [None] * count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Seats nobody has."""
        return len(self._free)

    def sit(self, sequence: Sequence, slot: int, fill: int) -> int:
        """Give `sequence` a seat; `fill` tokens must be in the KV cache before it decodes."""
        seat = self._free.pop()
        kept = sequence.kept
        self.alive[seat] = True
        self.watched[seat] = sequence.watched
        self.slot[seat] = slot
        self.filled[seat] = 0
        self.fill[seat] = fill
        self.length[seat] = 0
        self.blocks[seat] = 0
        self.published[seat] = 0
        self.scheduled[seat] = self.returned[seat] = self.kept[seat] = kept
        self.flying[seat] = 0
        self.limit[seat] = sequence.limit
        self.batch[seat] = sequence.priority >= BATCH and not sequence.vested
        self.account[seat] = sequence.account
        self.open_ended[seat] = bool(sequence.stops)
        self.stops[seat] = NO_STOP
        self.stops[seat, : len(sequence.stops)] = sequence.stops
        self.sequences[seat] = sequence
        sequence.seat = seat
        return seat

    def leave(self, seat: int) -> None:
        """Free the seat. Its slot and blocks are given up, and nothing is in flight for it."""
        assert self.flying[seat] == 0
        assert self.slot[seat] == NO_SLOT
        sequence = self.who(seat)
        sequence.seat = NO_SEAT
        self.alive[seat] = False
        self.sequences[seat] = None
        self._free.append(seat)

    def who(self, seat: int) -> Sequence:
        """The sequence in a seat that is taken."""
        sequence = self.sequences[seat]
        assert sequence is not None
        return sequence

    def taken(self) -> list[int]:
        """The seats that somebody has."""
        return [seat for seat, sequence in enumerate(self.sequences) if sequence is not None]

    def row(self, seat: int) -> Ints:
        """The blocks that a seat owns, in order, int32[blocks]."""
        return self.table[seat, : self.blocks[seat]]

    def store(self, seats: Ints, ids: Ints) -> None:
        """One more token has come back for each of `seats` (each seat once)."""
        column = self.returned[seats] - self.kept[seats]
        self.tokens[seats, column] = ids
        self.returned[seats] += 1
        full = seats[column == ROW - 1]
        for seat in full.tolist():
            self.move(seat)

    def move(self, seat: int) -> None:
        """Move the tokens of a seat's row to its sequence's chunks."""
        count = int(self.returned[seat] - self.kept[seat])
        if count:
            self.who(seat).chunks.append(self.tokens[seat, :count].copy())
            self.kept[seat] += count

    def generated(self, seat: int) -> Ints:
        """All that a sequence has generated, its earlier seats included, int32[returned]."""
        count = int(self.returned[seat] - self.kept[seat])
        tail = self.tokens[seat, :count]
        chunks = self.who(seat).chunks
        return np.concatenate([*chunks, tail]) if chunks else tail.copy()
