"""The plain layers against their formulas."""

import pytest
import torch
from torch.nn import functional as F

from workers.layers import ops
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
        torch.testing.assert_close(Linear(weight, term)(x), want, atol=1e-4, rtol=1e-5)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "_onednn", None)
            assert torch.equal(Linear(weight, term)(x), want)


def test_the_norm_divides_by_the_root_mean_square() -> None:
    """Over the last dimension, with eps under the root, times the weight."""
    weight = torch.tensor([1.0, 2.0, 0.5])
    want = X / (X.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    torch.testing.assert_close(RMSNorm(weight, 0.1)(X), want)


def test_a_product_of_the_norm_of_a_sum() -> None:
    """The sum is given back; without a residual it is the input itself."""
    norm, linear = RMSNorm(torch.tensor([1.0, 2.0, 0.5]), 0.1), Linear(torch.randn(4, 3), torch.randn(4))
    got, summed = norm.product(X, X.flip(0), linear)
    assert torch.equal(summed, X + X.flip(0))
    assert torch.equal(got, linear(norm(summed)))
    got, summed = norm.product(X, None, linear)
    assert torch.equal(summed, X)
    assert torch.equal(got, linear(norm(X)))


def test_the_mlp_gates_the_upper_half() -> None:
    """The fused product's first half is the gate, its second half what is let through, both of the norm of the sum,
    which is given back."""
    gate, up, down = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(0))
    norm = RMSNorm(torch.tensor([1.0, 2.0, 0.5]), 0.1)
    mlp = GatedMLP(norm, Linear(torch.cat((gate, up)), None), Linear(down.T, None))
    normed = norm(X + 1)
    hidden = normed @ gate.T
    got, summed = mlp(X, torch.ones_like(X))
    torch.testing.assert_close(got, (hidden * torch.sigmoid(hidden) * (normed @ up.T)) @ down)
    assert torch.equal(summed, X + 1)


def test_the_embedding_takes_rows() -> None:
    """One row a token."""
    assert Embedding(X)(torch.tensor([1, 0, 1])).tolist() == X[[1, 0, 1]].tolist()
