"""The gated feed-forward part of a layer (SwiGLU; Shazeer 2020, arXiv:2002.05202)."""

from dataclasses import dataclass

from torch import Tensor

from workers.layers.linear import Linear
from workers.layers.ops import TORCH, Ops


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(silu(gate(x)) · up(x)), with gate and up in one product."""

    gate_up: Linear
    """hidden → 2 · intermediate: the gate's rows, then those of up."""
    down: Linear
    """intermediate → hidden."""
    ops: Ops = TORCH

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] → [T, hidden]."""
        return self.down(self.ops.gate(self.gate_up(x)))
