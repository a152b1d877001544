"""Decoding rows by FlashInfer's FA2 kernel with tensor cores: a second opinion beside the Triton kernel.

It plans on the host, so it must be told lengths there: `Batch.bounds` are exact for every row that is alive, and all
that a dead row sees too much does not matter. A recorded batch has none. It is recorded with lengths of one, and
`replan` must come before each replay.
"""

import numpy as np
import torch
from torch import Tensor

from workers.attention.flashinfer_prefill import WORKSPACE, Pages, usable
from workers.batch import Batch
from workers.compact import Longs
from workers.kvcache import KVCache

_PARTS = 1024
"""More parts than FlashInfer splits rows into on any GPU."""
_AHEAD = 3
"""Plans of batches that are not recorded that may wait for the device."""


class FlashInferDecode:
    """See `DecodeHalf`. Recorded batches have at most `max_rows` rows, any number of them. Raises ValueError where
    FlashInfer is not `usable`."""

    plans_on_device = False

    def __init__(self, cache: KVCache, num_heads: int, max_rows: int) -> None:
        layer = cache.layers[0]
        kv_heads, head_dim = layer.shape[3:]
        if not usable(head_dim, layer.dtype, layer.device):
            raise ValueError("FlashInfer is not installed, or does not run on this device in this dtype")
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self._cache = cache
        self._shape = (num_heads, kv_heads, head_dim, cache.page_size)
        self._dtypes = {"q_data_type": layer.dtype, "kv_data_type": layer.dtype}
        self._max_rows = max_rows
        self._make = BatchDecodeWithPagedKVCacheWrapper
        # Recorded batches have their partial results at a fixed place: float32, 16 queries for each of the rows and of
        # the parts that rows are split into besides.
        partial = num_heads * (max_rows + _PARTS) * 16 * head_dim * 4
        self._workspace = torch.zeros(WORKSPACE + partial, dtype=torch.uint8, device=layer.device)
        # As in FlashInferPrefill: a wrapper's pinned memory is written again only when the device has read it.
        self._eager = [self._wrapper() for _ in range(_AHEAD)]
        self._read: list[torch.cuda.Event] = [torch.cuda.Event() for _ in range(_AHEAD)]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._recorded: dict[int, _Recorded] = {}
        self._ids: Tensor | None = None
        self._now = self._eager[0]

    def plan(self, batch: Batch) -> None:
        """See `Half.plan`. FlashInfer takes 2 µs a row for it."""
        skip = len(batch.sizes)
        if batch.bounds is None:
            self._now = self._record(batch.rows[skip:], batch.tables).wrapper
            return
        self._turn = (self._turn + 1) % _AHEAD
        self._read[self._turn].synchronize()
        self._now = self._eager[self._turn]
        pages = Pages(batch.bounds, self._cache.page_size)
        ids = pages.ids(batch.tables, batch.rows[skip:])
        self._now.plan(pages.indptr, ids, pages.last_len, *self._shape, seq_lens=pages.lengths, **self._dtypes)
        self._read[self._turn].record()

    def run(self, q: Tensor, layer: int, out: Tensor) -> None:
        """See `Half.run`."""
        self._now.run(q, self._cache.layers[layer], out=out)

    def replan(self, rows: Tensor, tables: Tensor, bounds: Longs) -> None:
        """See `DecodeHalf.replan`. Waits where the device has not begun the replay before."""
        from flashinfer.decode import fast_decode_plan

        recorded = self._recorded[len(rows)]
        recorded.read.synchronize()
        pages = Pages(bounds, self._cache.page_size)
        assert self._ids is not None
        recorded.indptr.copy_(pages.indptr, non_blocking=True)
        recorded.last_len.copy_(pages.last_len, non_blocking=True)
        self._ids[: pages.total].copy_(pages.ids(tables, rows))
        # The whole plan would loop over a tensor, two milliseconds for a thousand rows; this one leaves the buffers
        # to the caller.
        fast_decode_plan(
            recorded.wrapper,
            recorded.indptr,
            self._ids[: pages.total],
            pages.last_len,
            *self._shape,
            global_override_indptr_cpu=pages.indptr,
            **self._dtypes,
        )
        recorded.read.record()

    def _record(self, rows: Tensor, tables: Tensor) -> "_Recorded":
        count = len(rows)
        if count not in self._recorded:
            # The first run of a batch that is to be recorded, which is not yet being recorded.
            if self._ids is None:
                size = self._max_rows * tables.shape[1]
                self._ids = torch.zeros(size, dtype=torch.int32, device=tables.device)
            recorded = _Recorded(count, self._wrapper, self._ids)
            pages = Pages(np.ones(count, np.int64), self._cache.page_size)
            ids = pages.ids(tables, rows)
            recorded.wrapper.plan(pages.indptr, ids, pages.last_len, *self._shape, **self._dtypes)
            recorded.read.record()
            self._recorded[count] = recorded
        return self._recorded[count]

    def _wrapper(self, **buffers: object):  # type: ignore[no-untyped-def]  # FlashInfer has no types
        return self._make(self._workspace, "NHD", use_tensor_cores=True, backend="fa2", **buffers)


class _Recorded:
    """A wrapper for a recorded batch, with the buffers that its kernels were recorded to read."""

    def __init__(self, count: int, make, ids: Tensor) -> None:  # type: ignore[no-untyped-def]  # as above
        self.indptr = torch.zeros(count + 1, dtype=torch.int32, device=ids.device)
        self.last_len = torch.zeros(count, dtype=torch.int32, device=ids.device)
        self.read = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
        """The device has read the wrapper's pinned memory."""
        self.wrapper = make(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=self.indptr,
            paged_kv_indices_buffer=ids,
            paged_kv_last_page_len_buffer=self.last_len,
        )
