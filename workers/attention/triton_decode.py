"""Decoding rows by the Triton kernel that splits long rows on the device: it plans nothing on the host, so it can be
recorded once and replayed for any lengths."""

from torch import Tensor

from workers.batch import Batch
from workers.compact import Longs
from workers.kernels.decode import Splits, Tuning, tuning
from workers.kvcache import KVCache


class TritonDecode:
    """See `DecodeHalf`. For up to `max_rows` rows; raises ValueError where the kernel does not know the cache's dtype
    or the size of its heads."""

    plans_on_device = True

    def __init__(self, cache: KVCache, num_heads: int, max_rows: int, tuned: Tuning | None = None) -> None:
        layer = cache.layers[0]
        kv_heads, head_dim = layer.shape[3:]
        self._cache = cache
        self._splits = Splits(
            num_heads, kv_heads, head_dim, max_rows, layer.device, tuned or tuning(head_dim, layer.dtype)
        )
        self._tables: Tensor | None = None

    def plan(self, batch: Batch, firsts: Tensor | None = None) -> None:
        """See `Half.plan`. firsts: int32[D], the first key that each decoding row attends to; None: 0."""
        self._tables = batch.tables
        self._splits.list(batch.rows, batch.lengths, len(batch.sizes), firsts)

    def replan(self, rows: Tensor, tables: Tensor, bounds: Longs) -> None:
        """See `DecodeHalf.replan`: nothing, since all is planned on the device."""

    def run(self, q: Tensor, layer: int, out: Tensor, lse: Tensor | None = None) -> None:
        """See `Half.run`. lse: float32[D, H], takes each row's log-sum-exp, base 2; −inf where a row has no keys, and
        `out` is then 0."""
        assert self._tables is not None, "plan comes first"
        self._splits.attend(q, self._cache.layers[layer], self._tables, out, lse)
