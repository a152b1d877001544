"""Chunks of prompts by one of two kernels, whichever suits their lengths."""

from torch import Tensor

from workers.attention.base import Half
from workers.batch import Batch

LONG = 1024
"""Keys that a query attends to on average from which a step is a long one. FA3 is far faster at long rows; at short
ones, where attention is a few per cent of a step, what it plans on the host costs more than it saves."""


class ByLength:
    """See `Half`."""

    def __init__(self, short: Half, long: Half) -> None:
        self._short = short
        self._long = long
        self._now = short

    def plan(self, batch: Batch) -> None:
        """See `Half.plan`."""
        # A chunk's queries attend to its past, and to half of the chunk on average.
        keys = float((batch.sizes * (batch.ends - batch.sizes / 2)).sum()) / batch.prefilled
        self._now = self._long if keys >= LONG else self._short
        self._now.plan(batch)

    def run(self, q: Tensor, layer: int, out: Tensor) -> None:
        """See `Half.run`."""
        self._now.run(q, layer, out)
