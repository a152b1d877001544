"""How many steps to have in flight."""

import math

COVER = 0.008
"""Seconds of queued work that bridge a round trip and the engine's own pauses. A new request waits this much longer."""
SMOOTH = 0.2
SLOW = 0.02
"""Weight of one step in what a step takes in the long run, once there have been many."""


class Depth:
    """Run-ahead by time: short steps need more plans in flight than long ones."""

    __slots__ = ("_seen", "_step", "most", "pace")

    def __init__(self, most: int) -> None:
        """`most`: plans in flight at the very most."""
        self.most = most
        self._step: float | None = None
        self._seen = 0
        self.pace = 0.0
        """Seconds that a step takes in the long run; 0: nobody knows."""

    def observe(self, seconds: float) -> None:
        """A step took this long on the device."""
        self._seen += 1
        self.pace += max(SLOW, 1 / self._seen) * (seconds - self.pace)
        self._step = seconds if self._step is None else self._step + SMOOTH * (seconds - self._step)

    @property
    def value(self) -> int:
        """Plans that should be in flight: the one that runs and enough behind it for COVER, at least one."""
        if not self._step:
            return min(2, self.most)
        return max(min(1 + math.ceil(COVER / self._step), self.most), min(2, self.most))
