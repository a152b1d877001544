"""Decoding steps as CUDA graphs: what a step launches is recorded once for each of about forty numbers of rows, and
replayed with other numbers of rows filled up by rows of the spare slot.

A step is two graphs, so that something may come between them: the forward pass, and the choice of tokens (plain, or
full where a row uses top_k, top_p or min_p). What they read of the host is the slots of the rows, in one static buffer;
all else is device state, so a graph serves rows of any lengths.
"""

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from workers.slots import Slots

Progress = Callable[[int, int], None]
"""Called with the graphs recorded and the graphs in all."""

_EXACT = 8
"""Up to so many rows, there is a graph for each number."""
_PADDING = 8
"""Above, a graph serves the numbers down to 1 − 1/_PADDING of its own."""


def sizes(most: int) -> list[int]:
    """Numbers of rows to record for, rising, the last of which is `most`: no number up to it needs more than an eighth
    of padding."""
    found = list(range(1, min(most, _EXACT) + 1))
    while found[-1] < most:
        size = found[-1] * _PADDING // (_PADDING - 1)
        # Multiples of 8 fill the tiles of matrix products.
        found.append(min(max(size - size % 8 if size > 64 else size, found[-1] + 1), most))
    return found


class Graphs:
    """Recorded steps of up to `most` rows. They run on the stream that is current at the call, in the order of the
    calls; what a call returns stands until the next one."""

    def __init__(self, slots: Slots, hidden_size: int, dtype: torch.dtype, most: int) -> None:
        self.most = most
        self._spare = slots.max_slots
        self._sizes = sizes(most)
        self._rows = torch.full((most,), slots.max_slots, device=slots.device)
        """int64: the slots of the rows, and behind them the spare one."""
        self._placed: Tensor | None = None
        """The rows that `_rows` begins with."""
        self._hidden = torch.zeros((most, hidden_size), dtype=dtype, device=slots.device)
        self._ids = torch.zeros(most, dtype=torch.int32, device=slots.device)
        self._forward: dict[int, torch.cuda.CUDAGraph] = {}
        self._sample: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def record(
        self,
        forward: Callable[[Tensor], Tensor],
        sample: Callable[[Tensor, Tensor, Tensor, bool], None],
        progress: Progress,
    ) -> None:
        """Record every graph, the largest first, all in one pool of memory.

        `forward`: int64[D] slots → [D, hidden]. `sample`: [S, hidden], int64[S] slots, int32[S] for the ids, and
        whether any row may use top_k, top_p or min_p. Both run twice for each size: first to compile and to allocate,
        then to be recorded.
        """

        def run_forward(size: int) -> None:
            self._hidden[:size].copy_(forward(self._rows[:size]))

        def run_sample(size: int, full: bool) -> None:
            sample(self._hidden[:size], self._rows[:size], self._ids[:size], full)

        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for done, size in enumerate(reversed(self._sizes)):
                progress(done, len(self._sizes))
                self._forward[size] = _record(pool, lambda: run_forward(size))  # noqa: B023  # called within the turn
                for full in (False, True):
                    self._sample[size, full] = _record(pool, lambda: run_sample(size, full))  # noqa: B023  # the same
        torch.cuda.current_stream().wait_stream(stream)
        progress(len(self._sizes), len(self._sizes))

    def forward(self, rows: Tensor) -> Tensor:
        """The hidden states of decoding rows: int64[D] slots → [D, hidden]. `rows` must not change while it is held."""
        self._forward[self._place(rows)].replay()
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


def _record(pool: tuple[int, int], run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads do not touch the device, and must not be kept from their own work.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        run()
    finally:
        graph.capture_end()
    return graph
