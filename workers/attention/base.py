"""What the model sees of attention, whichever way it is computed."""

from typing import Protocol

from torch import Tensor

from workers.batch import Batch
from workers.compact import Longs
from workers.groups import Tiles
from workers.layers.rope import Rotation


class Attention(Protocol):
    """Attention of one step after another over the KV cache."""

    @property
    def tiles(self) -> Tiles | None:
        """How it takes what decoding rows share; None: it takes no notice of it."""

    def plan(self, batch: Batch) -> None:
        """Once a step, before the first `run`: what all layers share."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, layer: int) -> Tensor:
        """Rotate queries and keys, write keys and values, then let each token attend to its row up to itself.

        Takes q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]; returns [T, num_heads, head_dim]. All
        writes of the step come before its first read, so a row may share blocks that another row fills in this step.
        """


class Half(Protocol):
    """What a step's chunks attend to, or what its decoding rows do, over a cache that holds the step's keys and values
    already."""

    def plan(self, batch: Batch) -> None:
        """Once a step that has tokens of this half, before the first `run`: what all layers share."""

    def run(self, q: Tensor, layer: int, out: Tensor) -> None:
        """Let each token attend to its row up to itself. q, out: [tokens of this half, num_heads, head_dim], q
        rotated, `out` contiguous."""


class DecodeHalf(Half, Protocol):
    """One for decoding rows. `plan` and `run` of a batch without bounds may be recorded as a CUDA graph, which is then
    replayed for any lengths, each time after `replan`."""

    @property
    def plans_on_device(self) -> bool:
        """`replan` has nothing to do."""

    def replan(self, rows: Tensor, tables: Tensor, bounds: Longs) -> None:
        """Before a recorded batch of D rows is replayed, what the recording could not know: int64[D] slots,
        int32[slots, blocks], and int64[D] lengths on the host, upper bounds; 1 for rows that pad."""
