"""The small operations between a model's matrix products, behind one protocol: here in plain torch, which is the
reference; as fused kernels in workers/kernels/ops.py."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Ops(Protocol):
    """What the layers call. T tokens of C numbers; all tensors of one dtype."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last dimension, [C]: any shape that ends in it."""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and x + residual: [T, C] each. Both arguments are given away."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up: [T, 2F], the gate first → [T, F]."""


class TorchOps:
    """See `Ops`."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.norm`."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Ops.add_norm`."""
        summed = residual + x
        return self.norm(summed, weight, eps), summed

    def gate(self, gate_up: Tensor) -> Tensor:
        """See `Ops.gate`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


TORCH = TorchOps()


def ops_for(device: torch.device) -> Ops:
    """The fastest there are for a device."""
    if device.type == "cuda":
        from workers.kernels.ops import TritonOps

        return TritonOps()
    return TORCH
