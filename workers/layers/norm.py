"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension."""

    weight: Tensor
    """[size of the last dimension]."""
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Any shape that ends in the weight's."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
