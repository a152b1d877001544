"""Which waiting sequences may start: the policy, and nothing but the policy.

A sequence starts when the curve of blocks in use, with it, stays under the limit at each of the coming steps. How long
the sequences will run is predicted, so the curve can be wrong; a prediction that was too short is corrected when its
end has come, and if blocks run out all the same, somebody is preempted.
"""

from typing import NamedTuple

from toka.core.blocks import Ints
from toka.core.predictor import Predictor
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
"""By the name of the option."""


class Admission:
    """The curve, the predictor, and the decision."""

    __slots__ = ("_limit", "_looked", "_policy", "predictor", "usage")

    def __init__(self, num_blocks: int, max_len: int, policy: Policy) -> None:
        self._policy = policy
        self._limit = num_blocks - int(num_blocks * policy.margin) if policy.learn else num_blocks
        self._looked = 0
        self.predictor = Predictor(policy.learn)
        # A future starts when it is added or a few chunks later, and has at most max_len steps.
        self.usage = Usage(2 * max_len)

    def steps(self, generated: int, limit: int, open_ended: bool) -> int:
        """How many more tokens a sequence is predicted to generate, at least one unless it has all. One that no stop
        id can end (not `open_ended`) generates all that it may."""
        total = self.predictor.predict(generated, limit) if open_ended else limit
        return total - generated

    def admits(self, used: int, future: Future) -> bool:
        """Whether a sequence with this future may start beside `used` blocks in use. With nothing in use it may."""
        if used == 0:
            return True
        if not self._policy.look_ahead:
            return used + future.blocks <= self._limit
        return self.usage.peak(used, future) <= self._limit

    def look(self, step: int, generated: Ints, limit: Ints) -> None:
        """Let the predictor look at the running sequences, every now and then."""
        if step >= self._looked + self.predictor.pause:
            self._looked = step
            self.predictor.look(generated, limit)
