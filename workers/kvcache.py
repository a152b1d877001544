"""Keys and values of every token in flight, in blocks."""

import numpy as np
import torch
from torch import Tensor

from workers.models.config import ModelConfig


class KVCache:
    """`num_blocks` blocks of `page_size` tokens in every layer, and behind them a spare one that takes unwanted writes.

    Block b, offset o of a layer hold the key `layers[layer][b, 0, o]` and the value `layers[layer][b, 1, o]`, each
    [num_kv_heads, head_dim]. All of it starts as zeros: attention reads whole blocks and masks what is not the row's
    own, and a mask cannot hide a NaN.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_blocks + 1, 2, page_size, config.num_kv_heads, config.head_dim)
        self.num_blocks = num_blocks
        self.page_size = page_size
        self.spare = num_blocks
        """The id of the spare block."""
        self.layers: list[Tensor] = [_zeros(shape, dtype, device) for _ in range(config.num_layers)]
        """A layer: [num_blocks + 1, 2, page_size, num_kv_heads, head_dim]."""
        self._rows = [layer.view(-1, config.num_kv_heads * config.head_dim) for layer in self.layers]

    def places(self, writes: Tensor) -> Tensor:
        """Where `write` puts T tokens, found once a step.

        int64[T] flat places, block · page_size + offset → int64[2T] rows of a layer: the keys', then the values'.
        """
        keys = writes + writes.div(self.page_size, rounding_mode="floor") * self.page_size
        return torch.cat((keys, keys + self.page_size))

    def write(self, layer: int, k: Tensor, v: Tensor, places: Tensor) -> None:
        """Store keys and values, each [T, num_kv_heads, head_dim], at the `places` of T tokens."""
        rows = self._rows[layer]
        rows.index_copy_(0, places, torch.cat((k, v)).view(-1, rows.shape[1]))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # calloc takes memory from the system only once it is written, which torch.zeros does at once.
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
