"""Decoding steps as CUDA graphs: what a step launches is recorded once for each of some fifty numbers of rows, and
replayed with other numbers of rows filled up by rows of the spare slot.

A step is two graphs, so that something may come between them: the forward pass (plain, or with keys that rows share),
and the choice of tokens (plain, or full where a row uses top_k, top_p or min_p). What they read of the host lies in
static buffers: the slots of the rows, and what these share. All else is device state, so a graph serves rows of any
lengths.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from workers.compact import Longs
from workers.groups import MIN_ROWS, Layout, Shared, Tiles
from workers.recording import Recorder, sizes
from workers.slots import Slots

Progress = Callable[[int, int], None]
"""Called with the graphs recorded and the graphs in all."""


class Graphs:
    """Recorded steps of up to `most` rows. They run on the stream that is current at the call, in the order of the
    calls; what a call returns stands until the next one."""

    def __init__(
        self, slots: Slots, hidden_size: int, dtype: torch.dtype, most: int, tiles: Tiles | None = None
    ) -> None:
        """With `tiles`, there are graphs for rows that share keys."""
        self.most = most
        self._spare = slots.max_slots
        self._upload = slots.upload
        self._sizes = sizes(most)
        self._rows = torch.full((most,), slots.max_slots, device=slots.device)
        """int64: the slots of the rows, and behind them the spare one."""
        self._placed: Tensor | None = None
        """The rows that `_rows` begins with."""
        self._hidden = torch.zeros((most, hidden_size), dtype=dtype, device=slots.device)
        self._ids = torch.zeros(most, dtype=torch.int32, device=slots.device)
        self._tiles = tiles
        self._laid: Layout | None = None
        """What `_shared` holds."""
        self._shared = Shared(
            *(
                torch.zeros(shape, dtype=torch.int32, device=slots.device)
                for shape in ((tiles.most(most) if tiles else 0, 6), 2 * most, most, most)
            )
        )
        self._replan: Callable[[Tensor, Longs], None] = _nothing
        self._forward: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._sample: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def record(
        self,
        recorder: Recorder,
        forward: Callable[[Tensor, Shared | None], Tensor],
        sample: Callable[[Tensor, Tensor, Tensor, bool], None],
        replan: Callable[[Tensor, Longs], None],
        progress: Progress,
    ) -> None:
        """Record every graph, the largest first.

        `forward`: int64[D] slots and what they share → [D, hidden]. `sample`: [S, hidden], int64[S] slots, int32[S] for
        the ids, and whether any row may use top_k, top_p or min_p. `replan` runs before each replay of the former:
        int64[D] slots, and upper bounds of their lengths on the host, int64[D].
        """
        self._replan = replan

        def run_forward(size: int, shared: bool) -> None:
            self._hidden[:size].copy_(forward(self._rows[:size], self._shared_by(size) if shared else None))

        def run_sample(size: int, full: bool) -> None:
            sample(self._hidden[:size], self._rows[:size], self._ids[:size], full)

        for done, size in enumerate(reversed(self._sizes)):
            progress(done, len(self._sizes))
            for shared in (False, True) if self._tiles and size >= MIN_ROWS else (False,):
                self._forward[size, shared] = recorder.record(partial(run_forward, size, shared))
            for full in (False, True):
                self._sample[size, full] = recorder.record(partial(run_sample, size, full))
        progress(len(self._sizes), len(self._sizes))

    def forward(self, rows: Tensor, bounds: Longs, layout: Layout | None) -> Tensor:
        """The hidden states of decoding rows: int64[D] slots, their `Batch.bounds` and what they share → [D, hidden].
        `rows` and `layout` may not be changed; another of them is another object."""
        size = self._place(rows)
        self._replan(self._rows[:size], np.append(bounds, np.ones(size - len(bounds), np.int64)))
        if layout is not None and layout is not self._laid:
            self._lay(layout, size)
        self._forward[size, layout is not None].replay()
        return self._hidden[: len(rows)]

    def sample(self, hidden: Tensor, rows: Tensor, full: bool) -> Tensor:
        """The ids that rows choose: [S, hidden], int64[S] slots → int32[S]."""
        size = self._place(rows)
        if hidden.data_ptr() != self._hidden.data_ptr():
            self._hidden[: len(rows)].copy_(hidden)
        self._sample[size, full].replay()
        return self._ids[: len(rows)]

    def _place(self, rows: Tensor) -> int:
        """Put rows where the graphs find them; returns the size of the graph that serves them."""
        count = len(rows)
        size = self._sizes[bisect_left(self._sizes, count)]
        if rows is not self._placed:
            self._rows[:count].copy_(rows)
            self._rows[count:size].fill_(self._spare)
            self._placed = rows
        return size

    def _shared_by(self, size: int) -> Shared:
        """What a graph of so many rows reads."""
        assert self._tiles is not None, "without it, nothing is laid out"
        tiles, order, firsts, parts = self._shared
        return Shared(tiles[: self._tiles.most(size)], order, firsts[:size], parts[:size])

    def _lay(self, layout: Layout, size: int) -> None:
        """Put what rows share where the graph of so many rows finds it."""
        to = self._shared_by(size)
        for target, part in zip(to, layout.send(self._upload), strict=True):
            target[: len(part)].copy_(part)
        # Tiles of no rows, and rows that share nothing.
        for target, filled in ((to.tiles, layout.tiles), (to.firsts, layout.firsts), (to.parts, layout.parts)):
            target[len(filled) :].zero_()
        self._laid = layout


def _nothing(rows: Tensor, bounds: Longs) -> None:
    pass
