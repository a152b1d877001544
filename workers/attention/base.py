"""What the model sees of attention, whichever way it is computed."""

from typing import Protocol

from torch import Tensor

from workers.batch import Batch
from workers.layers.rope import Rotation


class Attention(Protocol):
    """Attention of one step after another over the KV cache."""

    def plan(self, batch: Batch) -> None:
        """Once a step, before the first `run`: what all layers share."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, layer: int) -> Tensor:
        """Rotate queries and keys, write the step's keys and values, then let each token attend to its row up to itself.

        Takes q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]; returns [T, num_heads, head_dim]. All
        writes of the step come before its first read, so a row may share blocks that another row fills in this step.
        """
