"""A histogram that takes a value many times at once, and the borders that each kind of value is sorted by."""

from bisect import bisect_left

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000)
CHOICES = (1, 2, 5, 10, 20, 50, 100)
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
    2560,
)
TOKEN = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5),
    *(7.5, 10, 20, 40, 80),
)
STEP = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 5, 10)
GAP = (0.00001, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1, 10)
WORK = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Histogram:
    """How many observations lie between the borders. `bounds` rise; a value that equals one counts below it."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Observations up to each border, and beyond the last; not cumulative."""
        self.sum = 0.0

    def __repr__(self) -> str:
        return f"<Histogram of {self.count}, sum {self.sum:g}>"

    @property
    def count(self) -> int:
        """Observations."""
        return sum(self.counts)

    def copy(self) -> "Histogram":
        """As it is now."""
        other = Histogram(self.bounds)
        other.counts, other.sum = self.counts.copy(), self.sum
        return other

    def observe(self, value: float, times: int = 1) -> None:
        """The same value, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
