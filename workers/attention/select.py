"""Which kernels attend."""

import torch

from workers.attention.base import Attention
from workers.attention.paged_torch import PagedTorch
from workers.errors import WorkerError
from workers.kvcache import KVCache
from workers.models.config import ModelConfig


def select(name: str, cache: KVCache, config: ModelConfig, max_rows: int) -> Attention:
    """The backend called `name`, for steps of at most `max_rows` decoding rows: `torch` anywhere; on a GPU `triton` or
    `flashinfer` for both halves; `auto` for the fastest there is. Raises WorkerError for one that cannot run here."""
    on_gpu = cache.layers[0].is_cuda
    if name == "torch" or (name == "auto" and not on_gpu):
        return PagedTorch(cache)
    if not on_gpu:
        raise WorkerError(f"attention_backend={name} needs a GPU; on a CPU there is torch")
    raise WorkerError(f"attention_backend={name} is not there")
