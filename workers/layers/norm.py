"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from dataclasses import dataclass

from torch import Tensor

from workers.layers.linear import Linear
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

    def product(self, x: Tensor, residual: Tensor | None, linear: Linear) -> tuple[Tensor, Tensor]:
        """`linear` of the norm of their sum, [T, out], and the sum, [T, size]. No residual is one of zeros. Both
        arguments are given away."""
        return self.ops.norm_product(x, residual, self.weight, self.eps, linear.weight, linear.bias)

    def gated(self, x: Tensor, residual: Tensor | None, gate_up: Linear) -> tuple[Tensor, Tensor]:
        """silu(gate) · up of the norm of their sum, [T, out / 2], and the sum; `gate_up` has the gate's rows first."""
        return self.ops.norm_gated(x, residual, self.weight, self.eps, gate_up.weight, gate_up.bias)
