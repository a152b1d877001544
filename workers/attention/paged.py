"""Attention in two halves: what chunks of prompts attend to, and what decoding rows do, each by the kernel that is
fastest at it. Both read a cache into which this writes first."""

from torch import Tensor

from workers.attention.base import Half
from workers.attention.hydragen import HydragenDecode
from workers.batch import Batch
from workers.compact import Longs
from workers.kernels.rotate import rotate_and_write
from workers.kvcache import KVCache
from workers.layers.rope import Rotation


class Paged:
    """See `Attention`. For a GPU; nothing here waits for it."""

    def __init__(self, cache: KVCache, prefill: Half, decode: Half) -> None:
        self._cache = cache
        self._prefill = prefill
        self._decode = decode
        self._writes: Tensor | None = None
        self._prefilled = 0
        self._tokens = 0
        self.recordable = decode.recordable
        self.tiles = decode.tiles if isinstance(decode, HydragenDecode) else None

    def plan(self, batch: Batch) -> None:
        """See `Attention.plan`."""
        self._writes = batch.writes
        self._prefilled = batch.prefilled
        self._tokens = len(batch.tokens)
        if self._prefilled:
            self._prefill.plan(batch)
        if self._prefilled < self._tokens:
            self._decode.plan(batch)

    def replan(self, rows: Tensor, tables: Tensor, bounds: Longs) -> None:
        """See `Attention.replan`."""
        self._decode.replan(rows, tables, bounds)

    def run(self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, layer: int) -> Tensor:
        """See `Attention.run`."""
        assert self._writes is not None, "plan comes first"
        q = rotate_and_write(q, k, v, rotation.table, rotation.positions, self._cache.layers[layer], self._writes)
        out = q.new_empty(q.shape)
        first = self._prefilled
        if first:
            self._prefill.run(q[:first], layer, out[:first])
        if first < self._tokens:
            self._decode.run(q[first:], layer, out[first:])
        return out
