"""Steps of few tokens that prefill beside decoding, as CUDA graphs.

Launching a step's kernels one by one takes the host some milliseconds, which only a step of many tokens hides. So
those of at most `MOST` tokens are recorded too, by their number of tokens alone: how many of these decode, and how many
belong to which chunk, is data. For this, a step is laid out differently: first the decoding rows, then the chunks'
tokens. Every token is attended to as a decoding row, those that are none as rows of the spare slot; and then the
chunks' tiles write over the latter.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from workers.batch import Batch
from workers.compact import Longs
from workers.recording import Recorder, sizes
from workers.slots import Slots

MOST = 2048
"""Tokens of the largest step that is worth recording."""
MOST_CHUNKS = 64
"""Chunks of a recorded step at most."""
_LEAST = 16
"""Tokens of the smallest."""

_NONE: Longs = np.zeros(0, np.int64)
_PADDED = ("tokens", "positions", "writes", "rows", "lengths", "chunks")

Tiled = Callable[[Longs, Longs], Longs]
"""The tiles of chunks by their sizes and ends: `workers.attention.triton_prefill.tiles`."""


@dataclass(frozen=True, slots=True)
class Laid:
    """A step of D decoding rows and some chunks, T tokens with the padding, on the device."""

    tokens: Tensor
    """int64[T]: those of the decoding rows, then of the chunks."""
    positions: Tensor
    """int64[T]."""
    writes: Tensor
    """int64[T]: see `Batch.writes`."""
    rows: Tensor
    """int64[T]: the slots of the decoding rows; then the spare slot."""
    lengths: Tensor
    """int32[T]: keys of the decoding rows; then 1."""
    tables: Tensor
    """int32[slots, blocks]: see `Batch.tables`."""
    chunks: Tensor
    """int64[MOST_CHUNKS]: the slots of the chunks; then the spare slot."""
    tiles: Tensor
    """int32[n, 4]: tiles of the chunks, see `workers.kernels.prefill.attend`; then tiles of no tokens."""

    def decoding(self) -> Batch:
        """All of its tokens as decoding rows."""
        return Batch(
            tokens=self.tokens,
            positions=self.positions,
            writes=self.writes,
            rows=self.rows,
            tables=self.tables,
            lengths=self.lengths,
            samples=self.tokens[:0],
            sizes=_NONE,
            ends=_NONE,
            bounds=None,
        )


class Mixed:
    """Recorded steps; what a call returns stands until the next one."""

    def __init__(
        self, slots: Slots, hidden_size: int, dtype: torch.dtype, queries: int, tiled: Tiled, most: int
    ) -> None:
        """`queries`: tokens of a tile at most. `most`: tokens of the largest step."""
        device = slots.device
        self._slots = slots
        self._queries = queries
        self._tiled = tiled
        self._most = most
        self._sizes = [size for size in sizes(most) if size >= min(_LEAST, most)]
        self._laid = Laid(
            tokens=torch.zeros(most, dtype=torch.int64, device=device),
            positions=torch.zeros(most, dtype=torch.int64, device=device),
            writes=torch.full((most,), slots.spare * slots.page_size, device=device),
            rows=torch.full((most,), slots.max_slots, device=device),
            lengths=torch.ones(most, dtype=torch.int32, device=device),
            tables=slots.tables,
            chunks=torch.full((MOST_CHUNKS,), slots.max_slots, device=device),
            tiles=torch.zeros((self._tiles(most), 4), dtype=torch.int32, device=device),
        )
        self._padding = replace(self._laid, **{name: getattr(self._laid, name).clone() for name in _PADDED})
        """What lies behind a step."""
        self._hidden = torch.zeros((most, hidden_size), dtype=dtype, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def record(
        self, recorder: Recorder, forward: Callable[[Laid], Tensor], progress: Callable[[int, int], None]
    ) -> None:
        """Record `forward`, a laid step's hidden states, [T, hidden], the largest first."""

        def run(size: int) -> None:
            self._hidden[:size].copy_(forward(self._part(size)))

        for done, size in enumerate(reversed(self._sizes)):
            progress(done, len(self._sizes))
            self._graphs[size] = recorder.record(partial(run, size))
        progress(len(self._sizes), len(self._sizes))

    def takes(self, batch: Batch) -> bool:
        """Whether there is a graph for it."""
        return batch.shared is None and len(batch.tokens) <= self._most and 0 < len(batch.sizes) <= MOST_CHUNKS

    def forward(self, batch: Batch) -> Tensor:
        """The hidden states of the tokens that are sampled, [S, hidden]."""
        count, chunks, filled = len(batch.tokens), len(batch.sizes), batch.prefilled
        size = self._sizes[bisect_left(self._sizes, count)]
        laid, padding = self._part(size), self._padding
        decoding = count - filled
        for name in ("tokens", "positions", "writes"):
            own, none = getattr(batch, name), getattr(padding, name)
            torch.cat((own[filled:], own[:filled], none[count:size]), out=getattr(laid, name))
        torch.cat((batch.rows[chunks:], padding.rows[decoding:size]), out=laid.rows)
        torch.cat((batch.lengths[chunks:], padding.lengths[decoding:size]), out=laid.lengths)
        torch.cat((batch.rows[:chunks], padding.chunks[chunks:]), out=laid.chunks)
        tiles = np.zeros((self._tiles(size), 4), np.int32)
        found = self._tiled(batch.sizes, batch.ends)
        tiles[: len(found)] = found
        tiles[: len(found), 1] += decoding
        laid.tiles.copy_(self._slots.upload(tiles))
        self._graphs[size].replay()
        samples = batch.samples
        return self._hidden[torch.where(samples < filled, samples + decoding, samples - filled)]

    def _tiles(self, size: int) -> int:
        """Tiles that so many tokens make at most."""
        return size // self._queries + MOST_CHUNKS

    def _part(self, size: int) -> Laid:
        """What the graph of so many tokens reads."""
        laid = self._laid
        return Laid(
            laid.tokens[:size],
            laid.positions[:size],
            laid.writes[:size],
            laid.rows[:size],
            laid.lengths[:size],
            laid.tables,
            laid.chunks,
            laid.tiles[: self._tiles(size)],
        )
