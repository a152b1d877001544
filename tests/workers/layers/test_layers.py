"""The plain layers against their formulas."""

import torch

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
