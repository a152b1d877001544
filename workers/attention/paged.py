"""Attention in two halves: what chunks of prompts attend to, and what decoding rows do, each by the kernel that is
fastest at it. Both read a cache into which this writes first."""

from torch import Tensor

from workers.attention.base import DecodeHalf, Half
from workers.attention.hydragen import HydragenDecode
from workers.attention.triton_prefill import TritonPrefill, tiles
from workers.batch import Batch
from workers.compact import Longs
from workers.kernels.rotate import rotate_and_write
from workers.kvcache import KVCache
from workers.layers.rope import Rotation
from workers.mixed import Laid


class Paged:
    """See `Attention`. For a GPU; nothing here waits for it."""

    def __init__(self, cache: KVCache, prefill: Half, decode: DecodeHalf, tiled: TritonPrefill) -> None:
        """`tiled`: attends to the chunks of steps that are recorded."""
        self._cache = cache
        self._tiled = tiled
        self._laid: Laid | None = None
        self._prefill = prefill
        self._decode = decode
        self._writes: Tensor | None = None
        self._prefilled = 0
        self._tokens = 0
        self.lays = decode.plans_on_device
        """`plan_laid` may be recorded."""
        self.tiles = decode.tiles if isinstance(decode, HydragenDecode) else None
        self.queries = tiled.queries
        """Tokens of a tile of `Laid` at most."""

    def plan(self, batch: Batch) -> None:
        """See `Attention.plan`."""
        self._writes, self._laid = batch.writes, None
        self._prefilled = batch.prefilled
        self._tokens = len(batch.tokens)
        if self._prefilled:
            self._prefill.plan(batch)
        if self._prefilled < self._tokens:
            self._decode.plan(batch)

    def list_tiles(self, sizes: Longs, ends: Longs) -> Longs:
        """The tiles of chunks, int64[P] tokens and keys of each: see `workers.attention.triton_prefill.tiles`."""
        return tiles(sizes, ends, self.queries)

    def plan_laid(self, laid: Laid) -> None:
        """`plan` for a step that is laid out to be recorded."""
        self._writes, self._laid = laid.writes, laid
        self._decode.plan(laid.decoding())

    def replan(self, rows: Tensor, tables: Tensor, bounds: Longs) -> None:
        """See `DecodeHalf.replan`."""
        self._decode.replan(rows, tables, bounds)

    def run(self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, layer: int) -> Tensor:
        """See `Attention.run`."""
        assert self._writes is not None, "plan comes first"
        q = rotate_and_write(q, k, v, rotation.table, rotation.positions, self._cache.layers[layer], self._writes)
        out = q.new_empty(q.shape)
        if self._laid is not None:
            self._decode.run(q, layer, out)
            self._tiled.attend(q, layer, out, self._laid.tables, self._laid.chunks, self._laid.tiles)
            return out
        first = self._prefilled
        if first:
            self._prefill.run(q[:first], layer, out[:first])
        if first < self._tokens:
            self._decode.run(q[first:], layer, out[first:])
        return out
