"""A matrix product."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """x Wᵀ + b."""

    weight: Tensor
    """[out, in]."""
    bias: Tensor | None
    """[out]."""

    def __call__(self, x: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        return F.linear(x, self.weight, self.bias)
