"""Chunks of prompts by FlashInfer: its FA3 kernel on Hopper, FA2 elsewhere. In 16 bits only.

FlashInfer plans on the host and takes what the host knows from there: cumulative tokens and blocks of the rows, their
last blocks' fill and their lengths. The ids of the blocks alone are gathered on the device.
"""

import importlib.util

import numpy as np
import torch
from torch import Tensor

from workers.batch import Batch
from workers.compact import Longs
from workers.kvcache import KVCache
from workers.upload import upload

WORKSPACE = 128 * 2**20
"""Bytes for the partial results of a layer, as FlashInfer recommends."""
_AHEAD = 3
"""Plans that may wait for the device."""


def usable(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether FlashInfer is there and takes such heads. It cannot even be imported without a GPU."""
    return (
        device.type == "cuda"
        and torch.cuda.is_available()
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128, 256)
        and importlib.util.find_spec("flashinfer") is not None
    )


class Pages:
    """The blocks of R rows of known lengths, as FlashInfer wants them. int32; on the host in pinned memory, which
    FlashInfer copies without waiting."""

    def __init__(self, lengths: Longs, page_size: int) -> None:
        """lengths: int64[R], on the host."""
        counts = -(-lengths // page_size)
        self.total = int(counts.sum())
        """Blocks of all rows."""
        self.indptr = pinned(np.append(0, np.cumsum(counts)))
        """[R + 1]: blocks of the rows before each."""
        self.last_len = pinned(lengths - (counts - 1) * page_size)
        """[R]: keys in each row's last block."""
        self.lengths = pinned(lengths)
        self._counts = counts

    def ids(self, tables: Tensor, rows: Tensor) -> Tensor:
        """int32[total]: the ids of the rows' blocks. tables int32[slots, blocks]; rows int64[R]; both on the device."""
        counts = upload(self._counts, tables.device)
        # The size is given, so nothing waits for the device to tell it.
        row = torch.repeat_interleave(counts, output_size=self.total)
        block = torch.arange(self.total, device=tables.device) - (counts.cumsum(0) - counts)[row]
        return tables[rows[row], block]


def pinned(values: Longs) -> Tensor:
    """The values in pinned memory, as int32."""
    return torch.from_numpy(values.astype(np.int32)).pin_memory()


class FlashInferPrefill:
    """See `Half`. Raises ValueError where FlashInfer is not `usable`."""

    def __init__(self, cache: KVCache, num_heads: int) -> None:
        layer = cache.layers[0]
        self._kv_heads, self._head_dim = layer.shape[3:]
        if not usable(self._head_dim, layer.dtype, layer.device):
            raise ValueError("FlashInfer is not installed, or does not run on this device in this dtype")
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._cache = cache
        self._num_heads = num_heads
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=layer.device)
        backend = "fa3" if torch.cuda.get_device_capability(layer.device)[0] == 9 else "fa2"
        # A wrapper plans in pinned memory of its own, which it may not write again before the device has read it: each
        # is used every third time, and its event says so. The workspace is the stream's, one step after another.
        self._wrappers = [BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend) for _ in range(_AHEAD)]
        self._read: list[torch.cuda.Event] = [torch.cuda.Event() for _ in range(_AHEAD)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def plan(self, batch: Batch) -> None:
        """See `Half.plan`. Waits only where the device is `_AHEAD` plans behind."""
        self._turn = (self._turn + 1) % _AHEAD
        self._read[self._turn].synchronize()
        layer = self._cache.layers[0]
        pages = Pages(batch.ends, self._cache.page_size)
        self._wrappers[self._turn].plan(
            pinned(np.append(0, np.cumsum(batch.sizes))),
            pages.indptr,
            pages.ids(batch.tables, batch.rows),
            pages.last_len,
            self._num_heads,
            self._kv_heads,
            self._head_dim,
            self._cache.page_size,
            causal=True,
            q_data_type=layer.dtype,
            kv_data_type=layer.dtype,
            seq_lens=pages.lengths,
            # Else it is found by a loop over a tensor.
            max_token_per_sequence=int(batch.sizes.max()),
        )
        self._read[self._turn].record()

    def run(self, q: Tensor, layer: int, out: Tensor) -> None:
        """See `Half.run`."""
        self._wrappers[self._turn].run(q, self._cache.layers[layer], out=out)
