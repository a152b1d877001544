"""Decoding rows that attend to what they share together, and to the rest each for itself."""

import torch
from torch import Tensor

from workers.attention.triton_decode import TritonDecode
from workers.batch import Batch
from workers.compact import Longs
from workers.groups import Shared, Tiles
from workers.kernels.prefill import tuning
from workers.kernels.shared import Segments
from workers.kvcache import KVCache

_PROGRAMS = 2
"""Programs a multiprocessor should have to do for what is shared."""


class HydragenDecode:
    """See `DecodeHalf`. For up to `max_rows` rows; a batch in which nothing is shared goes the plain way."""

    plans_on_device = True

    def __init__(self, cache: KVCache, num_heads: int, max_rows: int) -> None:
        layer = cache.layers[0]
        kv_heads, head_dim = layer.shape[3:]
        self._cache = cache
        self._own = TritonDecode(cache, num_heads, max_rows)
        self._segments = Segments(num_heads, kv_heads, head_dim, max_rows, layer.device, tuning(head_dim, layer.dtype))
        self._lse = torch.empty((max_rows, num_heads), dtype=torch.float32, device=layer.device)
        units = torch.cuda.get_device_properties(layer.device).multi_processor_count if layer.is_cuda else 4
        self.tiles = Tiles(self._segments.rows, enough=-(-_PROGRAMS * units // kv_heads))
        self._tables: Tensor | None = None
        self._shared: Shared | None = None

    def plan(self, batch: Batch) -> None:
        """See `Half.plan`."""
        self._tables, self._shared = batch.tables, batch.shared
        self._own.plan(batch, None if batch.shared is None else batch.shared.firsts)

    def replan(self, rows: Tensor, tables: Tensor, bounds: Longs) -> None:
        """See `DecodeHalf.replan`: nothing, since all is planned on the device."""

    def run(self, q: Tensor, layer: int, out: Tensor) -> None:
        """See `Half.run`."""
        assert self._tables is not None, "plan comes first"
        shared = self._shared
        if shared is None:
            self._own.run(q, layer, out)
            return
        lse = self._lse[: len(q)]
        self._segments.attend(q, self._cache.layers[layer], self._tables, shared)
        self._own.run(q, layer, out, lse)
        self._segments.merge(out, lse, shared)
