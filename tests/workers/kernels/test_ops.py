"""The fused small operations, against torch's."""

import pytest
import torch

from workers.kernels.ops import TritonOps
from workers.layers.ops import TorchOps

SHAPES = ((1, 64), (7, 96), (3, 2048))
PLAIN = TorchOps()


@pytest.fixture
def fused(device: torch.device) -> TritonOps:
    return TritonOps(device)


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """As near as two roundings to the dtype may lie."""
    bound = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[want.dtype]
    torch.testing.assert_close(got.float(), want.float(), atol=bound, rtol=bound)
    assert got.dtype == want.dtype


def test_the_norm_of_rows(fused: TritonOps, device: torch.device, dtype: torch.dtype) -> None:
    """Of any number and width."""
    for rows, size in SHAPES:
        x, weight = normal(rows, size, dtype=dtype, device=device), normal(size, dtype=dtype, device=device, seed=1)
        close(fused.norm(x, weight, 1e-5), PLAIN.norm(x, weight, 1e-5))


def test_the_norm_of_heads(fused: TritonOps, device: torch.device, dtype: torch.dtype) -> None:
    """Heads of tokens that lie within wider rows, as queries and keys do."""
    x, weight = normal(5, 12, 16, dtype=dtype, device=device), normal(16, dtype=dtype, device=device, seed=1)
    close(fused.norm(x[:, 8:10], weight, 1e-6), PLAIN.norm(x[:, 8:10], weight, 1e-6))


def test_the_norm_of_a_sum(fused: TritonOps, device: torch.device, dtype: torch.dtype) -> None:
    """The sum is rounded to the dtype before it is normalised, and given back."""
    for rows, size in SHAPES:
        x, y = (normal(rows, size, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
        weight = normal(size, dtype=dtype, device=device, seed=2)
        want, total = PLAIN.add_norm(x, y, weight, 1e-5)
        got, summed = fused.add_norm(x, y, weight, 1e-5)
        assert torch.equal(summed, total)
        close(got, want)


def test_the_gate(fused: TritonOps, device: torch.device, dtype: torch.dtype) -> None:
    """silu of the first half times the second, for widths that no block divides."""
    for rows, size in (*SHAPES, (2, 1500)):
        x = normal(rows, 2 * size, dtype=dtype, device=device) * 4
        close(fused.gate(x), PLAIN.gate(x.float()).to(dtype))


def test_nothing_of_nothing(fused: TritonOps, device: torch.device) -> None:
    """A step may have no tokens."""
    none, weight = torch.empty(0, 64, device=device), torch.ones(64, device=device)
    assert fused.norm(none, weight, 1e-5).shape == fused.add_norm(none, none, weight, 1e-5)[0].shape == (0, 64)
    assert fused.gate(none).shape == (0, 32)
