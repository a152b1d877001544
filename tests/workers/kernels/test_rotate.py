"""Rotation and the write into the cache in one, against the two apart."""

import pytest
import torch

from workers.kernels.rotate import rotate_and_write
from workers.layers.rope import Rotation


@pytest.mark.parametrize(("heads", "kv_heads", "size", "page"), [(4, 2, 16, 4), (9, 3, 64, 16), (12, 12, 80, 1)])
def test_rotated_and_written(
    heads: int, kv_heads: int, size: int, page: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Queries come back rotated; keys, rotated, and values lie in their places, and the rest is as it was."""
    generator = torch.Generator().manual_seed(0)
    tokens, blocks = 7, 9
    qkv = torch.randn(tokens, heads + 2 * kv_heads, size, generator=generator).to(device, dtype)
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    angles = torch.rand(50, size // 2, generator=generator) * 100
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    positions = torch.randint(50, (tokens,), generator=generator).to(device)
    writes = torch.randperm(blocks * page, generator=generator)[:tokens].to(device)
    layer = torch.randn(blocks, 2, page, kv_heads, size, generator=generator).to(device, dtype)
    want = layer.clone()
    rotation = Rotation(table, positions)
    want[writes // page, 0, writes % page] = rotation(k)
    want[writes // page, 1, writes % page] = v
    got = rotate_and_write(q, k, v, table, positions, layer, writes)
    bound = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(got, rotation(q), atol=bound, rtol=bound)
    torch.testing.assert_close(layer, want, atol=bound, rtol=bound)
    assert torch.equal(layer[writes // page, 1, writes % page], v)
