"""Which prompts a step computes: those that have begun, then those of the queue that may start.

Blocks are shared before they are computed: a sequence leads in the blocks that it is about to compute, and those whose
prompts go on with them wait for it and read them then. If it goes, the first of them leads on.
"""

from collections import defaultdict
from itertools import islice
from typing import NamedTuple

import numpy as np

from toka.core.admission import Admission
from toka.core.blocks import Ints
from toka.core.counts import Counts
from toka.core.forecast import Forecast
from toka.core.ledger import Ledger
from toka.core.limits import Limits
from toka.core.prefix import PrefixTree
from toka.core.queue import Queue
from toka.core.seats import Seats
from toka.core.sequence import BATCH, Sequence
from toka.core.usage import Future
from toka.wire import Admit

LOOK = 64
"""How far behind the head of the queue a sequence may stand that starts before it."""
LOOK_PAST = 4
"""Sequences that do not fit which one step looks past. Each costs the look at a curve."""
MAX_PASSED = 64
"""Sequences that may start before a tenant's first that does not fit."""
KEPT_FREE = 8
"""For so many slots or blocks that others have, the batch lane leaves one free: the next of them find room without its
having to give way."""


class Filled(NamedTuple):
    """What a step prefills."""

    chunks: list[tuple[int, int, int]]
    """(slot, start, length) of each."""
    sequences: list[Sequence]
    """Whose they are."""
    seats: Ints
    """Those that are filled with this step, in the order of their chunks."""
    admits: list[Admit]
    started: list[Sequence]
    """Those that took a seat."""


class Prefill:
    """The prompts of one replica, from the queue to their last chunk. The parts it works on are the scheduler's."""

    def __init__(
        self,
        limits: Limits,
        seats: Seats,
        tree: PrefixTree,
        forecast: Forecast,
        admission: Admission,
        queue: Queue,
        ledger: Ledger,
        counts: Counts,
    ) -> None:
        self._limits = limits
        self._seats = seats
        self._tree = tree
        self._forecast = forecast
        self._admission = admission
        self._queue = queue
        self._ledger = ledger
        self._counts = counts
        self.slots = list(range(limits.max_seqs - 1, -1, -1))
        """Those that are free."""
        self.begun: list[int] = []
        """Seats whose prompts are not filled yet, in the order of their starts."""
        self.leads: dict[bytes, int] = {}
        """The seat that is about to compute a block, by the block's name."""
        self.crowded = False
        """Somebody found no room with the last call of `fill`, or found that the batch lane has it."""
        self._passed: dict[int, int] = defaultdict(int)
        """For each account: sequences that started before the first of its own that does not fit."""

    def __repr__(self) -> str:
        return f"<Prefill: {len(self.begun)} begun, {len(self.leads)} blocks awaited, {len(self.slots)} slots free>"

    def fill(self, budget: int, decoding: Ints) -> Filled:
        """Spend up to `budget` tokens of a step that decodes `decoding`: first on the prompts begun, then on new ones
        in the order of the queue; the batch lane after all others, whether it has begun or not."""
        chunks: list[tuple[int, int, int]] = []
        sequences: list[Sequence] = []
        filled: list[int] = []
        started: list[Sequence] = []
        admits: list[Admit] = []
        seats = self._seats

        def start(*, batch: bool = True) -> int | None:
            found = self._next(budget, decoding, batch)
            if found is None:
                return None
            started.append(found[0])
            seat, admit = self._seat(*found)
            admits.append(admit)
            return seat

        def chunk(seat: int) -> None:
            nonlocal budget
            first, fill = int(seats.filled[seat]), int(seats.fill[seat])
            count = min(budget, fill - first)
            budget -= count
            chunks.append((int(seats.slot[seat]), first, count))
            sequence = seats.who(seat)
            sequences.append(sequence)
            self._counts.ran(sequence.prompt.ids, sequence.reached, first, first + count)
            seats.filled[seat] = seats.length[seat] = first + count
            self._publish(seat)
            if first + count == fill:
                filled.append(seat)

        self._queue.promote()
        begun, batch = self.begun, seats.batch
        behind = [seat for seat in begun if batch[seat]]
        for seat in [seat for seat in begun if not batch[seat]] if behind else begun.copy():
            if budget <= 0:
                break
            chunk(seat)
        while behind and budget > 0 and (new := start(batch=False)) is not None:
            chunk(new)
        for seat in behind:
            if budget <= 0:
                break
            chunk(seat)
        while budget > 0 and (new := start()) is not None:
            chunk(new)
        return Filled(chunks, sequences, np.array(filled, dtype=np.int32), admits, started)

    def _next(self, budget: int, decoding: Ints, batch: bool) -> "tuple[Sequence, Ints, Ints, int, Future] | None":
        """The next sequence of the queue that may start, what it fills, the blocks that the tree has of it, how many
        more it takes, and what it will use; None: nobody. One that does not fit may be passed by a few others behind
        it, and then by nobody until it starts. Without `batch` the batch lane stays out."""
        if not self.slots or not self._seats.free:
            self.crowded = len(self._queue) > self._queue.batch
            return None
        refused: list[int] = []
        for sequence in islice(self._queue, LOOK):
            kept_free = 0
            if sequence.priority >= BATCH and not sequence.vested:
                slots, kept_free = self._kept_free(decoding)
                if not batch or len(self.slots) <= slots:
                    return None
            fill = sequence.fill()
            if not sequence.names:  # while it waits they stay what they are
                sequence.names = self._tree.extend(self._tree.digests(sequence.prompt), fill)
            # The last token is run again for its logits, so its block is never taken from the tree.
            usable = sequence.names[: (len(fill) - 1) // self._limits.page_size]
            if sequence.uncached:
                usable = []
            hit = self._tree.match(usable, fill)
            if len(hit) < len(usable) and usable[len(hit)] in self.leads:
                continue  # somebody is about to compute its next block: it waits for that, and others may pass
            new = self._limits.blocks_for(len(fill)) - len(hit)
            future = self._forecast.of(sequence, len(fill), hit, new, budget, len(self.begun) + len(decoding))
            enough = new + self._tree.pool.idle(hit) + kept_free <= self._tree.pool.available
            if enough and self._admission.admits(self._forecast.usage, self._tree.pool.used + kept_free, future):
                for account in set(refused):
                    self._passed[account] += 1
                if sequence.account not in refused:
                    self._passed[sequence.account] = 0
                return sequence, fill, hit, new, future
            if sequence.priority < BATCH:
                self.crowded = True
            refused.append(sequence.account)
            if len(refused) > LOOK_PAST or self._passed[sequence.account] >= MAX_PASSED:
                return None
        return None

    def _kept_free(self, decoding: Ints) -> tuple[int, int]:
        """Slots and blocks that the batch lane leaves to the others."""
        seats = self._seats
        running = np.concatenate([np.array(self.begun, dtype=np.int32), decoding])
        others = running[~seats.batch[running]]
        return len(others) // KEPT_FREE, int(seats.blocks[others].sum()) // KEPT_FREE

    def _seat(self, sequence: Sequence, fill: Ints, hit: Ints, new: int, future: Future) -> tuple[int, Admit]:
        """Give a sequence its slot and its blocks: those that the tree has, and `new` ones."""
        seats = self._seats
        self._queue.remove(sequence)
        seat = seats.sit(sequence, self.slots.pop(), len(fill))
        self._tree.pool.share(hit)
        blocks = np.concatenate([hit, self._tree.pool.take(new)])
        seats.table[seat, : len(blocks)] = blocks
        seats.blocks[seat] = len(blocks)
        seats.published[seat] = len(hit)
        self._forecast.start(seat, future)
        seats.filled[seat] = seats.length[seat] = len(hit) * self._limits.page_size
        cached = int(seats.filled[seat])
        if not sequence.kept:
            sequence.cached = cached
        if not sequence.starts and not sequence.uncached:
            self._counts.queries += len(fill)
            self._counts.hits += cached
        self._ledger.bill(sequence, len(fill) - cached)
        self._counts.found(sequence.prompt.ids, sequence.reached, cached)
        sequence.starts += 1
        self.leads.update(dict.fromkeys(sequence.names[len(hit) :], seat))
        self.begun.append(seat)
        return seat, Admit(
            slot=int(seats.slot[seat]),
            ids=fill.astype("<i4").tobytes(),
            blocks=blocks.astype("<i4").tobytes(),
            stops=np.array(sequence.stops, dtype="<i4").tobytes(),
            seed=sequence.seed,
            choice=sequence.choice,
            prompt_len=len(sequence.prompt),
            sampling=sequence.sampling,
        )

    def _publish(self, seat: int) -> None:
        """A chunk is planned: the blocks that it fills are anybody's to read."""
        seats, sequence = self._seats, self._seats.who(seat)
        start, full = int(seats.published[seat]), int(seats.filled[seat]) // self._limits.page_size
        if full > start:
            names = sequence.names[:full]
            seats.published[seat] = self._tree.publish(names, sequence.fill(), seats.row(seat), start)
            self.unlead(names[start:], seat)

    def unlead(self, names: list[bytes], seat: int) -> None:
        """The blocks of these names are computed, or will not be: nobody waits for `seat` to do it any more."""
        for name in names:
            if self.leads.get(name) == seat:
                del self.leads[name]
