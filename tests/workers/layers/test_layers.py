"""The plain layers against their formulas."""

import pytest
import torch
from torch.nn import functional as F

from workers.layers import linear
from workers.layers.embedding import Embedding
from workers.layers.linear import Linear
from workers.layers.mlp import GatedMLP
from workers.layers.norm import RMSNorm

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, -4.0]])


def test_linear_with_and_without_a_bias() -> None:
    """x Wᵀ + b."""
    weight, bias = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, -1.0]]), torch.tensor([10.0, 20.0])
    assert Linear(weight, None)(X).tolist() == [[6.0, -5.0], [-11.5, 4.0]]
    assert Linear(weight, bias)(X).tolist() == [[16.0, 15.0], [-1.5, 24.0]]


@pytest.mark.parametrize("rows", [0, 1, 2, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_torch(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With oneDNN's operator and without, for any number of rows, of rows that do not lie next to each other too."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 100, generator=generator).to(dtype)[:, 7:71]
    weight, bias = torch.randn(40, 64, generator=generator).to(dtype), torch.randn(40, generator=generator).to(dtype)
    for term in (bias, None):
        want = F.linear(x, weight, term)
        torch.testing.assert_close(linear.product(x, weight, term), want, atol=1e-4, rtol=1e-5)
        with monkeypatch.context() as patch:
            patch.setattr(linear, "_onednn", None)
            assert torch.equal(linear.product(x, weight, term), want)


def test_the_norm_divides_by_the_root_mean_square() -> None:
    """Over the last dimension, with eps under the root, times the weight."""
    weight = torch.tensor([1.0, 2.0, 0.5])
    want = X / (X.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    torch.testing.assert_close(RMSNorm(weight, 0.1)(X), want)


def test_the_mlp_gates_the_upper_half() -> None:
    """The fused product's first half is the gate, its second half what is let through."""
    gate, up, down = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(0))
    mlp = GatedMLP(Linear(torch.cat((gate, up)), None), Linear(down.T, None))
    hidden = X @ gate.T
    want = (hidden * torch.sigmoid(hidden) * (X @ up.T)) @ down
    torch.testing.assert_close(mlp(X), want)


def test_the_embedding_takes_rows() -> None:
    """One row a token."""
    assert Embedding(X)(torch.tensor([1, 0, 1])).tolist() == X[[1, 0, 1]].tolist()
