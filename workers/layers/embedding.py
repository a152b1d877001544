"""Token ids to vectors."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Embedding:
    """One row a token id."""

    weight: Tensor
    """[vocab, hidden]."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """int64[T] → [T, hidden]."""
        return F.embedding(tokens, self.weight)
