"""Which waiting sequences may start: the policy, and nothing but the policy.

A sequence starts when the curve of blocks in use, with it, stays under the limit at each of the coming steps. How long
the sequences will run is predicted, so the curve can be wrong; a prediction that was too short is corrected when its
end has come, and if blocks run out all the same, somebody is preempted.
"""

from typing import NamedTuple

from toka.core.usage import Future, Usage


class Policy(NamedTuple):
    """What one may choose about admission."""

    look_ahead: bool = True
    """Look at the coming steps. Off: a sequence starts as soon as its prompt fits, which fills the cache at once and
    then preempts much."""
    learn: bool = True
    """Predict lengths from those of ended sequences. Off: everybody is taken to use all of max_tokens, which never
    preempts and leaves the cache empty to the extent that answers are shorter."""
    margin: float = 0.004
    """Share of the blocks that admission leaves alone, for predictions that are too short."""


POLICIES = {
    "predicted": Policy(),
    "reserved": Policy(learn=False),
    "greedy": Policy(look_ahead=False, margin=0),
}
"""By the simulator's names."""


class Admission:
    """The decision, under one policy."""

    __slots__ = ("_limit", "_look_ahead")

    def __init__(self, num_blocks: int, policy: Policy) -> None:
        # Where nothing is predicted, no prediction can be too short.
        self._limit = num_blocks - int(num_blocks * policy.margin) if policy.learn else num_blocks
        self._look_ahead = policy.look_ahead

    def admits(self, usage: Usage, used: int, future: Future) -> bool:
        """Whether a sequence with this future may start beside `used` blocks in use. With nothing in use it may."""
        if used == 0:
            return True
        if not self._look_ahead:
            return used + future.blocks <= self._limit
        return usage.peak(used, future) <= self._limit
