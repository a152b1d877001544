"""The gated feed-forward part of a layer (SwiGLU; Shazeer 2020, arXiv:2002.05202)."""

from dataclasses import dataclass

from torch import Tensor

from workers.layers.linear import Linear
from workers.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(silu(gate(x)) · up(x)) on a normalised copy of the residual, with gate and up in one product."""

    norm: RMSNorm
    gate_up: Linear
    """hidden → 2 · intermediate: the gate's rows, then those of up."""
    down: Linear
    """intermediate → hidden."""

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the part before gave and its residual → this part's output, and the residual that it is still to be
        added to. All [T, hidden]."""
        gated, residual = self.norm.gated(x, residual, self.gate_up)
        return self.down(gated), residual
