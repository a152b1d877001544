"""Chunks of prompts by the Triton kernel: any dtype, any size of head, no library but Triton."""

import numpy as np
from torch import Tensor

from workers.batch import Batch
from workers.compact import Longs
from workers.kernels.prefill import Tuning, attend, queries, tuning
from workers.kvcache import KVCache
from workers.upload import upload


class TritonPrefill:
    """See `Half`. Raises ValueError where the kernel does not know the cache's dtype or the size of its heads."""

    def __init__(self, cache: KVCache, num_heads: int, tuned: Tuning | None = None) -> None:
        layer = cache.layers[0]
        kv_heads, head_dim = layer.shape[3:]
        self._cache = cache
        self._tuned = tuned or tuning(head_dim, layer.dtype)
        self.queries = queries(num_heads // kv_heads, self._tuned)
        self._step: tuple[Tensor, Tensor, Tensor] | None = None

    def plan(self, batch: Batch) -> None:
        """See `Half.plan`."""
        listed = tiles(batch.sizes, batch.ends, self.queries).astype(np.int32)
        self._step = (batch.tables, batch.rows, upload(listed, batch.tables.device))

    def run(self, q: Tensor, layer: int, out: Tensor) -> None:
        """See `Half.run`."""
        assert self._step is not None, "plan comes first"
        self.attend(q, layer, out, *self._step)

    def attend(self, q: Tensor, layer: int, out: Tensor, tables: Tensor, rows: Tensor, tiles: Tensor) -> None:
        """Let the tokens of some tiles attend, whichever of q they are: see `workers.kernels.prefill.attend`."""
        attend(q, self._cache.layers[layer], tables, rows, tiles, out, self._tuned)


def tiles(sizes: Longs, ends: Longs, queries: int) -> Longs:
    """int64[n, 4]: the tiles of chunks, as `workers.kernels.prefill.attend` takes them, those with most keys first, so
    that no long one starts when the others are about to end. sizes, ends: int64[P], see `Batch`."""
    counts = -(-sizes // queries)
    rows = np.repeat(np.arange(len(sizes)), counts)
    firsts = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    tokens = (np.cumsum(sizes) - sizes)[rows] + firsts
    positions = (ends - sizes)[rows] + firsts
    found = np.stack([rows, tokens, positions, np.minimum(sizes[rows] - firsts, queries)], axis=1)
    return found[np.argsort(-positions, kind="stable")]
