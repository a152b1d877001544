"""A pretend GPU in arrays alone: no token means anything, but every sequence ends where the workload says.

`toka.sim.worker` has the pretend worker that proves plans right; this one is for speed, and trusts them.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toka.core.blocks import Ints
from toka.sim.cost import Work
from toka.wire import NO_TOKEN, Admit, Plan

STOP_ID = 2
"""What a sequence samples when it has generated all that the workload gives it."""
FIRST_ID = 3
"""What sequence 0 samples before that, over and over; each sequence has an id of its own, so that no two of them end up
with the same text."""
NO_END = 2**30
Longs = NDArray[np.int64]


class Sampled(NamedTuple):
    """What one step brought, and what it took."""

    ids: bytes
    """As in `toka.wire.Tokens`."""
    sequences: Longs
    """Those that got a token, int64[live rows]."""
    rows: int
    """Tokens sampled, those of sequences that had ended included."""
    recomputed: int
    """Prefilled tokens whose keys and values had been computed before, for the same sequence."""
    work: Work


class Device:
    """Slots as a worker keeps them. `Admit.seed` says which sequence of the workload has the slot."""

    def __init__(self, slots: int, page_size: int, ends: Longs, computed: Longs) -> None:
        """`ends`: at how many generated tokens each sequence samples the stop id, int64[sequences]. `computed`, of the
        same shape and zero at first: how many tokens' keys and values each has had; devices may share it."""
        self._page = page_size
        self._ends = ends
        self._computed = computed
        self._sequence: Longs = np.zeros(slots, dtype=np.int64)
        self._left: Longs = np.zeros(slots, dtype=np.int64)
        """Tokens until the stop id; below zero, it has been sampled."""
        self._length: Longs = np.zeros(slots, dtype=np.int64)
        self._fill: Longs = np.zeros(slots, dtype=np.int64)
        self._decoding: Ints = np.zeros(0, dtype=np.int32)
        self._groups: dict[int, tuple[int, int]] = {}
        """For each Hydragen group the tokens that it shares, and these with those of its parent."""
        self._shared: Longs = np.zeros(slots, dtype=np.int64)
        """Tokens of a slot that its groups read for it."""

    def run(self, plan: Plan) -> Sampled:
        """Run one step."""
        for admit in plan.admits:
            self._admit(admit)
        if plan.decode is not None:
            self._decoding = np.frombuffer(plan.decode, "<i4")
        roster = decoding = self._decoding
        kv_tokens = int(self._length[decoding].sum()) + len(decoding)
        if plan.groups or plan.members:
            self._regroup(plan)
        if self._groups:
            kv_tokens += sum(own for own, _ in self._groups.values()) - int(self._shared[decoding].sum())
        self._length[decoding] += self._left[decoding] > 0
        tokens = pairs = recomputed = 0
        if plan.chunks:
            slots, starts, counts = np.frombuffer(plan.chunks, "<i4").reshape(-1, 3).astype(np.int64).T
            ends = starts + counts
            tokens = int(counts.sum())
            pairs = int((counts * (starts + ends + 1) // 2).sum())
            recomputed = self._recompute(self._sequence[slots], starts, ends)
            self._length[slots] = ends
            roster = np.concatenate([slots[ends == self._fill[slots]], decoding])
        left = self._left[roster] - 1
        self._left[roster] = left
        sequences = self._sequence[roster]
        ids = (sequences + FIRST_ID).astype("<i4")
        ids[left == 0] = STOP_ID
        ids[left < 0] = NO_TOKEN
        return Sampled(
            ids=ids.tobytes(),
            sequences=sequences[left >= 0],
            rows=len(roster),
            recomputed=recomputed,
            work=Work(len(decoding), kv_tokens, tokens, pairs),
        )

    def _admit(self, admit: Admit) -> None:
        slot, sequence, tokens = admit.slot, admit.seed, len(admit.ids) // 4
        generated = tokens - admit.prompt_len
        self._sequence[slot] = sequence
        self._left[slot] = self._ends[sequence] - generated
        self._fill[slot] = tokens
        self._shared[slot] = 0
        if generated:  # it was preempted, with all but its last token in the cache
            self._computed[sequence] = max(self._computed[sequence], tokens - 1)

    def _regroup(self, plan: Plan) -> None:
        groups = self._groups
        for group in plan.groups:
            if group.blocks:
                own = len(group.blocks) // 4 * self._page
                groups[group.id] = (own, own + (groups[group.parent][1] if group.parent >= 0 else 0))
            else:
                del groups[group.id]
        for slot, id in np.frombuffer(plan.members, "<i4").reshape(-1, 2).tolist():
            self._shared[slot] = groups[id][1] if id >= 0 else 0

    def _recompute(self, sequences: Longs, starts: Longs, ends: Longs) -> int:
        computed = self._computed[sequences]
        self._computed[sequences] = np.maximum(computed, ends)
        return int(np.maximum(np.minimum(computed, ends) - starts, 0).sum())
