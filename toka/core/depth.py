"""How many steps to have in flight."""

import math

COVER = 0.008
"""Seconds of queued work that bridge a round trip and the engine's own pauses. A new request waits this much longer."""
SMOOTH = 0.2


class Depth:
    """Run-ahead by time: short steps need more plans in flight than long ones."""

    __slots__ = ("_step", "most")

    def __init__(self, most: int) -> None:
        """`most`: plans in flight at the very most."""
        self.most = most
        self._step: float | None = None

    def observe(self, seconds: float) -> None:
        """A step took this long on the device."""
        self._step = seconds if self._step is None else self._step + SMOOTH * (seconds - self._step)

    @property
    def value(self) -> int:
        """Plans that should be in flight: the one that runs and enough behind it for COVER, at least one."""
        if not self._step:
            return min(2, self.most)
        return max(min(1 + math.ceil(COVER / self._step), self.most), min(2, self.most))
