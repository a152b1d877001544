"""What layers compute, behind one protocol: here in plain torch, which is the reference; in kernels of our own, some of
which do several of it at once, in workers/kernels/ops.py."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Ops(Protocol):
    """What the layers call. T tokens of C numbers; all tensors of one dtype."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b: [T, C], [N, C], [N] → [T, N]."""

    def norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) · scale over the last dimension, [C]: any shape that ends in it."""

    def add_norm(self, x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and x + residual: [T, C] each. Both arguments are given away."""

    def norm_product(
        self, x: Tensor, residual: Tensor | None, scale: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The product of the norm of x + residual, [T, N], and x + residual, [T, C]. No residual is one of zeros. Both
        are given away."""

    def norm_gated(
        self, x: Tensor, residual: Tensor | None, scale: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`norm_product` of a gate and what it lets through, W's first half and its second: silu(gate) · up instead,
        [T, N / 2]."""


class TorchOps:
    """See `Ops`."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Ops.product`."""
        if _onednn is not None and x.dtype == torch.float32 and x.is_cpu and len(x):
            result: Tensor = _onednn(x, weight, bias, "none", [], "")
            return result
        return F.linear(x, weight, bias)

    def norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        """See `Ops.norm`."""
        return F.rms_norm(x, scale.shape, scale, eps)

    def add_norm(self, x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Ops.add_norm`."""
        summed = residual + x
        return self.norm(summed, scale, eps), summed

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up: [T, 2F], the gate first → [T, F]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def norm_product(
        self, x: Tensor, residual: Tensor | None, scale: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.norm_product`."""
        if residual is None:
            return self.product(self.norm(x, scale, eps), weight, bias), x
        normed, summed = self.add_norm(x, residual, scale, eps)
        return self.product(normed, weight, bias), summed

    def norm_gated(
        self, x: Tensor, residual: Tensor | None, scale: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.norm_gated`."""
        gate_up, summed = self.norm_product(x, residual, scale, eps, weight, bias)
        return self.gate(gate_up), summed


def _find_onednn() -> Callable[..., Tensor] | None:
    """oneDNN's product, by the operator that compiled models call on a CPU; None where torch is built without it.

    F.linear takes MKL for float32, which has no threads for a single row and does poorly on other makers' CPUs: on an
    AMD EPYC with two threads, one row reads its weights at 18 GB/s through MKL and at 55 GB/s through oneDNN.
    """
    try:
        found: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:
        return None
    return found


_onednn = _find_onednn()
TORCH = TorchOps()


def ops_for(device: torch.device) -> Ops:
    """The fastest there are for a device."""
    if device.type == "cuda":
        from workers.kernels.ops import TritonOps

        return TritonOps(device)
    return TORCH
