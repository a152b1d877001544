"""The prefix cache: which blocks hold the keys and values of which tokens.

A full block's name is the digest of the tokens in it chained to the name of the block before, so a name stands for a
whole prefix, and the names of a prompt's blocks are a path in a radix tree. The tree needs no nodes: a dictionary from
names to blocks is enough, because it is closed under taking the parent (only leaves are evicted, see `BlockPool`).

Digests are BLAKE2b, 128 bits, keyed: a client that does not know the key cannot make two prompts collide. On a hit the
tokens are compared all the same.
"""

from collections.abc import Callable, Iterable
from hashlib import blake2b

import numpy as np

from toka.core.blocks import BlockPool, Ints
from toka.core.prompt import Prompt

DIGEST_BYTES = 16
ROOT = b""
"""The parent of a first block. Its true parent, a digest of the salt, is in no tree."""
NO_BLOCKS: Ints = np.zeros(0, dtype=np.int32)
Named = Callable[[bytes, bool], None]


class PrefixTree:
    """Names of full blocks. Owns the pool's `named` flags and nothing else of it."""

    __slots__ = ("_blocks", "_children", "_content", "_key", "_named", "_names", "_parent", "page_size", "pool")

    def __init__(self, num_blocks: int, page_size: int, key: bytes = b"", named: Named | None = None) -> None:
        """`key`: up to 64 bytes, the same for all replicas that share digests. `named` is told of each name that comes
        (True) or goes (False)."""
        self._named = named
        self.page_size = page_size
        self.pool = BlockPool(num_blocks, self._forget)
        self._key = key
        self._blocks: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._content: dict[int, bytes] = {}
        self._parent: dict[int, bytes] = {}
        self._children: dict[tuple[bytes, bytes], bytes] = {}

    def __repr__(self) -> str:
        return f"<PrefixTree of {len(self._blocks)} blocks, {self.pool!r}>"

    def __len__(self) -> int:
        """Blocks that have a name."""
        return len(self._blocks)

    def digests(self, prompt: Prompt) -> list[bytes]:
        """The names of a prompt's full blocks. Worked out once for all its sequences."""
        if prompt.digests is None:
            root = blake2b(prompt.salt.encode(), digest_size=DIGEST_BYTES, key=self._key).digest()
            prompt.digests = self._chain(root, prompt.ids)
        return prompt.digests

    def extend(self, digests: list[bytes], ids: Ints) -> list[bytes]:
        """The names of all full blocks of `ids`, of which `digests` are the first."""
        done = len(digests)
        if not done or len(ids) // self.page_size == done:
            return digests
        return digests + self._chain(digests[-1], ids[done * self.page_size :])

    def _chain(self, before: bytes, ids: Ints) -> list[bytes]:
        size, data = 4 * self.page_size, ids.astype("<i4").tobytes()
        children, names = self._children, []
        for end in range(size, len(data) + 1, size):
            content = data[end - size : end]
            # A name that the tree knows is looked up, which costs a fifth of working it out.
            before = children.get((before, content)) or self._name(before, content)
            names.append(before)
        return names

    def _name(self, before: bytes, content: bytes) -> bytes:
        return blake2b(before + content, digest_size=DIGEST_BYTES, key=self._key).digest()

    def match(self, digests: list[bytes], ids: Ints) -> Ints:
        """The blocks that hold the longest known beginning of `ids`, whose full blocks are called `digests`."""
        # The tree is closed under taking the parent, so known names come before unknown ones: search for the border.
        low, high = 0, len(digests)
        while low < high:
            middle = (low + high) // 2
            if digests[middle] in self._blocks:
                low = middle + 1
            else:
                high = middle
        blocks = [self._blocks[name] for name in digests[:low]]
        data = ids[: low * self.page_size].astype("<i4").tobytes()
        if b"".join([self._content[block] for block in blocks]) != data:
            return NO_BLOCKS  # two prefixes of one name: the odds are 2^-128, the harm would be another's answer
        return np.array(blocks, dtype=np.int32)

    def publish(self, digests: list[bytes], ids: Ints, row: Ints, start: int) -> int:
        """Name the blocks of `row` from `start` on as the blocks of `ids`, called `digests`. Stops at a name that
        another block has: a reader of the blocks after it would own them without owning that one. Returns how many
        blocks of the row have been gone through."""
        size, data = 4 * self.page_size, ids[: len(digests) * self.page_size].astype("<i4").tobytes()
        for index, block in enumerate(row[start : len(digests)].tolist(), start):
            name = digests[index]
            if self._blocks.setdefault(name, block) != block:
                return index
            content = data[index * size : (index + 1) * size]
            self._names[block] = name
            self._content[block] = content
            self._parent[block] = parent = digests[index - 1] if index else ROOT
            if index:
                self._children[parent, content] = name
            self.pool.named[block] = True
            if self._named:
                self._named(name, True)
        return len(digests)

    def release(self, row: Ints, digests: list[bytes], ids: Ints, start: int) -> None:
        """Give back the row of an owner that is through with it, naming first what has no name yet: the blocks from
        `start` on that `digests` and `ids` describe."""
        own = True
        while start < len(digests):
            start = self.publish(digests, ids, row, start)
            if start < len(digests):
                own = False
                start += 1  # another block has this name, and stands in for ours before the blocks that follow
        self.pool.give(row)
        if not own:
            self.pool.touch(self._blocks[name] for name in digests)

    def names(self) -> Iterable[bytes]:
        """All names that blocks have."""
        return self._blocks.keys()

    def _forget(self, block: int) -> None:
        name = self._names.pop(block)
        del self._blocks[name]
        self._children.pop((self._parent.pop(block), self._content.pop(block)), None)
        if self._named:
            self._named(name, False)

    def check(self) -> None:
        """Prove that names and blocks fit each other."""
        assert len(self._blocks) == len(self._names) == len(self._content) == len(self._parent)
        assert sorted(self._names) == np.flatnonzero(self.pool.named).tolist(), "a name without a flag, or the reverse"
        for name, block in self._blocks.items():
            assert self._names[block] == name
            parent = self._parent[block]
            assert parent == ROOT or parent in self._blocks, "a block whose parent was evicted before it"
            assert parent == ROOT or self._children[parent, self._content[block]] == name
        assert len(self._children) == sum(parent != ROOT for parent in self._parent.values())
