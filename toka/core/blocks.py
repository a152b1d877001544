"""The pool of KV-cache blocks of one replica."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def forget_nothing(block: int) -> None:
    """For a pool whose blocks have no names."""


class BlockPool:
    """Who owns each block. A block is in one of three states:

        free      on the stack: nobody owns it, and its content means nothing
        owned     by one sequence or several that share it (`owners` counts them)
        retained  nobody owns it, but it has a name in the prefix tree, so its content may be wanted again

    `available` blocks are the free and the retained. Taking more than are free evicts retained ones, the least recently
    released first. Those are always leaves of the tree: an owner of a block owns all the blocks before it, and gives
    them back last block first, so a block is never released earlier than the blocks that follow it.
    """

    __slots__ = ("_forget", "_free", "_retained", "_stack", "evictions", "named", "num_blocks", "owners")

    def __init__(self, num_blocks: int, forget: Callable[[int], None] = forget_nothing) -> None:
        """`forget` is told of each block that is evicted, and takes away its name."""
        self.num_blocks = num_blocks
        self.owners: Ints = np.zeros(num_blocks, dtype=np.int32)
        self.named = np.zeros(num_blocks, dtype=bool)
        self.evictions = 0
        self._stack: Ints = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._free = num_blocks
        self._retained: OrderedDict[int, None] = OrderedDict()
        self._forget = forget

    def __repr__(self) -> str:
        return f"<BlockPool {self._free} free and {self.retained} retained of {self.num_blocks}>"

    @property
    def available(self) -> int:
        """Blocks that nobody owns."""
        return self._free + len(self._retained)

    @property
    def used(self) -> int:
        """Blocks that somebody owns."""
        return self.num_blocks - self.available

    @property
    def retained(self) -> int:
        """Blocks that nobody owns, kept for their content."""
        return len(self._retained)

    def take(self, count: int) -> Ints:
        """`count` available blocks with one owner each, int32[count]. The caller has looked at `available`."""
        assert 0 <= count <= self.available, f"{count} blocks asked of {self}"
        if self._free < count:
            self._evict(count - self._free)
        start = self._free - count
        blocks = self._stack[start : self._free].copy()
        self._free = start
        self.owners[blocks] = 1
        return blocks

    def share(self, blocks: Ints) -> None:
        """One more owner for each of `blocks`, which are owned or retained, no block twice."""
        for block in blocks[self.owners[blocks] == 0].tolist():
            del self._retained[block]
        self.owners[blocks] += 1

    def idle(self, blocks: Ints) -> int:
        """How many of `blocks` nobody owns: what `share` would take from `available`."""
        return int(np.count_nonzero(self.owners[blocks] == 0))

    def give(self, blocks: Ints) -> None:
        """One owner less for each of `blocks`: the row of one owner, in the order of its tokens."""
        self.owners[blocks] -= 1
        last = blocks[self.owners[blocks] == 0]
        named = self.named[last]
        self._push(last[~named])
        for block in reversed(last[named].tolist()):
            self._retained[block] = None

    def touch(self, blocks: Iterable[int]) -> None:
        """Those of `blocks` that are retained count as released now, last block first."""
        for block in reversed(list(blocks)):
            if block in self._retained:
                self._retained.move_to_end(block)

    def _evict(self, count: int) -> None:
        blocks: Ints = np.array([self._retained.popitem(last=False)[0] for _ in range(count)], dtype=np.int32)
        for block in blocks.tolist():
            self._forget(block)
        self.named[blocks] = False
        self._push(blocks)
        self.evictions += count

    def _push(self, blocks: Ints) -> None:
        end = self._free + len(blocks)
        self._stack[self._free : end] = blocks
        self._free = end

    def check(self, rows: Iterable[Ints]) -> None:
        """Prove that `rows`, those of all owners, are what `owners` counts, and that every other block is free or
        retained, and not both."""
        count: Ints = np.zeros(self.num_blocks, dtype=np.int32)
        for row in rows:
            assert len(set(row.tolist())) == len(row), "a block twice in one row"
            count[row] += 1
        assert (count == self.owners).all(), "owners miscounted"
        for block in self._retained:
            assert self.owners[block] == 0, f"block {block} is owned and retained"
            assert self.named[block], f"block {block} is retained without a name"
        free = self._stack[: self._free]
        assert not self.named[free].any(), "a free block has a name"
        count[free] += 1
        count[list(self._retained)] += 1
        assert (count >= 1).all(), "a block is lost"
        assert count[free].max(initial=1) == 1, "a block is free and owned, or free twice"
