"""Which replica a sequence starts on."""

import numpy as np
from numpy.typing import NDArray

Longs = NDArray[np.int64]

COMPUTE = 2
"""What a token to compute costs, in tokens to wait for: it is waited for as well, and then lost to everybody else."""


class Router:
    """One index from a block's name to the replicas that hold it, so that a sequence is placed without a walk through
    each replica's tree."""

    __slots__ = ("_holders", "page_size", "replicas")

    def __init__(self, replicas: int, page_size: int) -> None:
        self.replicas = replicas
        self.page_size = page_size
        self._holders: dict[bytes, set[int]] = {}

    def __repr__(self) -> str:
        return f"<Router of {self.replicas} replicas, {len(self._holders)} names>"

    def __len__(self) -> int:
        """Names that some replica holds."""
        return len(self._holders)

    def holders(self, name: bytes) -> set[int]:
        """The replicas that hold a block of this name."""
        return self._holders.get(name, set())

    def named(self, replica: int, name: bytes, holds: bool) -> None:
        """A replica's tree has given a name to a block, or taken it away."""
        if holds:
            self._holders.setdefault(name, set()).add(replica)
            return
        holders = self._holders[name]
        holders.remove(replica)
        if not holders:
            del self._holders[name]

    def lost(self, replica: int) -> None:
        """A replica's epoch is over: it holds nothing any more."""
        for name in [name for name, holders in self._holders.items() if replica in holders]:
            self.named(replica, name, False)

    def hits(self, names: list[bytes]) -> dict[int, int]:
        """For each replica that holds a beginning of the prefix whose blocks are called `names`: how many of them."""
        found: dict[int, int] = {}
        alive: set[int] = set()
        for depth, name in enumerate(names):
            holders = self._holders.get(name)
            staying = set() if holders is None else set(holders) if depth == 0 else alive & holders
            found.update(dict.fromkeys(alive - staying, depth))
            alive = staying
            if not alive:
                return found
        found.update(dict.fromkeys(alive, len(names)))
        return found

    def place(self, names: list[bytes], tokens: int, load: Longs, soon: int | None = None) -> tuple[int, int]:
        """The replica for a prompt of `tokens` tokens, when `load` tokens are to be run before it, int64[replicas]: the
        one where waiting and computing cost least. Of equals the first. `soon` is a replica that is about to compute
        all of `names`. Returns the replica and the tokens that it must run."""
        best, run = int(load.argmin()), tokens
        least = int(load[best]) + COMPUTE * tokens
        hits = self.hits(names)
        if soon is not None:
            hits[soon] = len(names)
        for replica, depth in sorted(hits.items()):
            left = tokens - depth * self.page_size
            cost = int(load[replica]) + COMPUTE * left
            if cost < least:
                best, run, least = replica, left, cost
        return best, run
