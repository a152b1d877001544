"""The pool of KV-cache blocks of one replica."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class BlockPool:
    """Which blocks are free. A block has one owner at a time.

    Blocks are taken from a stack, so the most recently given back is used again first, while it may still be warm.
    """

    __slots__ = ("_free", "_stack", "_taken", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._stack: Ints = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._free = num_blocks
        self._taken = np.zeros(num_blocks, dtype=bool)

    def __repr__(self) -> str:
        return f"<BlockPool {self._free} of {self.num_blocks} free>"

    @property
    def free(self) -> int:
        """How many blocks nobody owns."""
        return self._free

    def take(self, count: int) -> Ints:
        """`count` free blocks, int32[count]. The caller has looked at `free`."""
        assert 0 <= count <= self._free, f"{count} blocks asked of {self}"
        start = self._free - count
        blocks = self._stack[start : self._free].copy()
        self._free = start
        self._taken[blocks] = True
        return blocks

    def give(self, blocks: Ints) -> None:
        """Give `blocks` back, each taken and no block twice."""
        assert self._taken[blocks].all(), f"a free block given back to {self}"
        self._taken[blocks] = False
        end = self._free + len(blocks)
        self._stack[self._free : end] = blocks
        self._free = end

    def check(self, owned: Iterable[Ints]) -> None:
        """Prove that `owned`, the rows of all owners, and the free blocks are each block once."""
        count = np.zeros(self.num_blocks, dtype=np.int64)
        for row in owned:
            np.add.at(count, row, 1)
        assert (count == self._taken).all(), "blocks owned twice, or owned and free, or lost"
        np.add.at(count, self._stack[: self._free], 1)
        assert (count == 1).all(), "the free stack and the owners are not each block once"
