"""Which kernels attend."""

import torch

from workers.attention.base import Attention
from workers.attention.paged_torch import PagedTorch
from workers.errors import WorkerError
from workers.kvcache import KVCache
from workers.models.config import ModelConfig


def select(name: str, cache: KVCache, config: ModelConfig, max_rows: int, hydragen: bool) -> Attention:
    """The backend called `name`, for steps of at most `max_rows` decoding rows.

    `torch` runs anywhere; on a GPU there are `triton` and `flashinfer`, which do prompts and decoding alike, and `auto`
    is the fastest for each. `hydragen`: what rows share is read for all of them at once. Raises WorkerError where it
    cannot be had.
    """
    layer = cache.layers[0]
    if name == "torch" or (name == "auto" and not layer.is_cuda):
        if hydragen:
            raise WorkerError("use_hydragen=T needs a GPU, and attention_backend=auto or triton")
        return PagedTorch(cache)
    if not layer.is_cuda:
        raise WorkerError(f"attention_backend={name} needs a GPU; on a CPU there is torch")
    from workers.attention.by_length import ByLength
    from workers.attention.flashinfer_decode import FlashInferDecode
    from workers.attention.flashinfer_prefill import FlashInferPrefill, usable
    from workers.attention.hydragen import HydragenDecode
    from workers.attention.paged import Paged
    from workers.attention.triton_decode import TritonDecode
    from workers.attention.triton_prefill import TritonPrefill

    heads, here = config.num_heads, usable(config.head_dim, layer.dtype, layer.device)
    try:
        tiled = TritonPrefill(cache, heads)
    except ValueError as error:
        raise WorkerError(f"{error}: attention_backend=torch takes any") from error
    if name == "flashinfer":
        if hydragen:
            raise WorkerError("use_hydragen=T needs attention_backend=auto or triton")
        if not here:
            raise WorkerError(
                "attention_backend=flashinfer needs flashinfer-python, bfloat16 or float16, and heads of 64, 128 or 256"
            )
        return Paged(cache, FlashInferPrefill(cache, heads), FlashInferDecode(cache, heads, max_rows), tiled)
    decode = (HydragenDecode if hydragen else TritonDecode)(cache, heads, max_rows)
    # FA3 is what pays: elsewhere FlashInfer's plan on the host costs more than its kernel saves.
    hopper = torch.cuda.get_device_capability(layer.device)[0] == 9
    fa3 = name == "auto" and here and hopper
    prefill = ByLength(tiled, FlashInferPrefill(cache, heads)) if fa3 else tiled
    return Paged(cache, prefill, decode, tiled)
