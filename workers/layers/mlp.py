"""The gated feed-forward part of a layer (SwiGLU; Shazeer 2020, arXiv:2002.05202)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from workers.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(silu(gate(x)) · up(x)), with gate and up in one product."""

    gate_up: Linear
    """hidden → 2 · intermediate: the gate's rows, then those of up."""
    down: Linear
    """intermediate → hidden."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] → [T, hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
