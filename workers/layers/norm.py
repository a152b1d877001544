"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from dataclasses import dataclass

from torch import Tensor

from workers.layers.ops import TORCH, Ops


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension."""

    weight: Tensor
    """[size of the last dimension]."""
    eps: float
    ops: Ops = TORCH

    def __call__(self, x: Tensor) -> Tensor:
        """Any shape that ends in the weight's."""
        return self.ops.norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of their sum, and the sum: [T, size] each. Both arguments are given away."""
        return self.ops.add_norm(x, residual, self.weight, self.eps)
