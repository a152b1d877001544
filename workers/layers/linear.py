"""A matrix product."""

from dataclasses import dataclass

from torch import Tensor

from workers.layers.ops import TORCH, Ops


@dataclass(frozen=True, slots=True)
class Linear:
    """x Wᵀ + b."""

    weight: Tensor
    """[out, in]."""
    bias: Tensor | None
    """[out]."""
    ops: Ops = TORCH

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out]."""
        return self.ops.product(x, self.weight, self.bias)
