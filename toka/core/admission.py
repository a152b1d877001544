"""Which waiting sequences may start: the policy, and nothing but the policy."""

from typing import NamedTuple


class Load(NamedTuple):
    """What admission looks at, for one replica, in blocks and sequences."""

    free_blocks: int
    running: int
    page_size: int


HEADROOM = 64
"""Steps of growth of everything that runs for which blocks are left free when a sequence starts. More: fewer
preemptions, and a smaller batch."""


def admits(load: Load, blocks: int) -> bool:
    """Whether a sequence that needs `blocks` at once may start now, first come, first served.

    With nothing running it may whenever it fits, so a sequence that fits the pool always starts in the end.
    """
    if load.running == 0:
        return blocks <= load.free_blocks
    growth = -(-(load.running + 1) * HEADROOM // load.page_size)
    return blocks + growth <= load.free_blocks
