"""What happened: kept by those who do it, once a step, a sequence or a request, and never once a token.

Gauges are not kept at all: they are the engine's state at the moment when somebody asks (`State`). What the core counts
is in its own `Counts`. Everything here belongs to the event loop.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from toka.config import Config
from toka.core.counts import Counts
from toka.core.progress import Work
from toka.metrics.histogram import (
    CHOICES,
    FIRST_TOKEN,
    GAP,
    LATENCY,
    SIZES,
    STEP,
    STEP_TOKENS,
    TOKEN,
    WORK,
    Histogram,
)

ABORT = "abort"
"""The finished reason of what nobody waits for any more."""
ERROR = "error"
"""The finished reason of what the engine could not finish."""
REASONS = ("stop", "length", ABORT, ERROR)
KINDS = ("prefill", "decode", "mixed")


class State(NamedTuple):
    """The engine at one moment: sequences, and blocks of KV cache."""

    running: int = 0
    waiting: int = 0
    """In both lanes."""
    waiting_batch: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    groups: int = 0
    up: bool = False
    """A worker is ready."""

    @property
    def blocks(self) -> int:
        """All of them."""
        return self.blocks_used + self.blocks_cached + self.blocks_free

    @property
    def usage(self) -> float:
        """The share of the KV cache that sequences own, 0 to 1."""
        return self.blocks_used / self.blocks if self.blocks else 0.0


class Times:
    """When the things happened to a sequence that happen once, by the clock of its `Metrics`; 0.0: not yet."""

    __slots__ = ("arrived", "first", "paused", "started")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.started = 0.0
        self.first = 0.0
        self.paused = 0.0
        """When its last token before a preemption had come."""


class Metrics:
    """All that is counted of one engine and the API in front of it."""

    def __init__(self, config: Config, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, from any beginning but 0."""
        self.config = config
        self.model_name = model_name
        self.clock = clock
        self.state: Callable[[], State] = State
        """Set by the engine."""
        self.counts = Counts()
        self.finished = dict.fromkeys(REASONS, 0)
        self.requests: Counter[tuple[str, str]] = Counter()
        """By endpoint and status."""
        self.rejections: Counter[str] = Counter()
        """By reason."""
        self.startup: dict[str, float] = {}
        """Seconds by phase, of the last worker's start."""
        self.tokenizing = 0
        """Texts that are being tokenized or wait for it."""
        self.first_token = Histogram(FIRST_TOKEN)
        self.inter_token = Histogram(TOKEN)
        self.per_token = Histogram(TOKEN)
        self.e2e = Histogram(LATENCY)
        self.queue = Histogram(LATENCY)
        self.prefill = Histogram(LATENCY)
        self.decode = Histogram(LATENCY)
        self.inference = Histogram(LATENCY)
        self.prompt_tokens = Histogram(SIZES)
        self.generation_tokens = Histogram(SIZES)
        self.longest_generation = Histogram(SIZES)
        self.params_n = Histogram(CHOICES)
        self.params_max_tokens = Histogram(SIZES)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.step_duration = {kind: Histogram(STEP) for kind in KINDS}
        self.step_gap = Histogram(GAP)
        self.scheduling = Histogram(WORK)
        self.loop_lag = Histogram(WORK)
        self.tokenize = Histogram(WORK)
        self._workers = 0
        self._phase: tuple[str, float] | None = None
        self._planning = 0.0
        self._landed = 0.0

    def __repr__(self) -> str:
        return f"<Metrics of {self.model_name}: {sum(self.finished.values())} sequences over>"

    @property
    def restarts(self) -> int:
        """Workers that have joined, but for the first."""
        return max(0, self._workers - 1)

    # The API

    def answered(self, endpoint: str, status: str, reason: str | None) -> None:
        """A request has had its answer; `reason`: why it was not let in, if it was not."""
        self.requests[endpoint, status] += 1
        if reason is not None:
            self.rejections[reason] += 1

    def abandoned(self) -> None:
        """A client has hung up before the engine heard of what it wanted."""
        self.finished[ABORT] += 1

    @contextlib.contextmanager
    def tokenized(self) -> Iterator[None]:
        """Texts of one request are tokenized inside, at once or after some time in a queue."""
        began = self.clock()
        self.tokenizing += 1
        try:
            yield
        finally:
            self.tokenizing -= 1
            self.tokenize.observe(self.clock() - began)

    # The worker

    def joined(self) -> None:
        """A worker is let in."""
        self._workers += 1
        if self._workers > 1:
            self.startup.clear()
        self.phase("join")

    def phase(self, name: str | None) -> None:
        """The worker's start has come to another phase, or to its end."""
        now = self.clock()
        if self._phase is not None:
            before, began = self._phase
            if before == name:
                return
            self.startup[before] = self.startup.get(before, 0.0) + now - began
        self._phase = None if name is None else (name, now)

    # Sequences

    def submitted(self, samples: int, limits: list[int]) -> None:
        """A request: samples of each prompt, and the new tokens that each sequence may have."""
        self.params_n.observe(samples)
        for limit in dict.fromkeys(limits):
            self.params_max_tokens.observe(limit, limits.count(limit))

    def started(self, times: Times, now: float) -> None:
        """A sequence has its seat, for the first time or again."""
        if not times.started:
            times.started = now
            self.queue.observe(now - times.arrived)

    def preempted(self, times: Times) -> None:
        """A sequence has lost its seat. Its last token, if it has any, came with the last step."""
        times.paused = self._landed

    def begun(self, times: Times, now: float) -> None:
        """The first token of a sequence since it has its seat."""
        if times.first:
            self.inter_token.observe(now - times.paused)
            return
        times.first = now
        self.prefill.observe(now - times.started)
        self.first_token.observe(now - times.arrived)

    def ended(self, times: Times, reason: str, prompt: int, generated: int) -> None:
        """A sequence is over, with so many tokens."""
        self.finished[reason] += 1
        if reason in (ABORT, ERROR):
            return
        now = self.clock()
        decoding = now - times.first
        self.e2e.observe(now - times.arrived)
        self.inference.observe(now - times.started)
        self.decode.observe(decoding)
        if generated > 1:
            self.per_token.observe(decoding / (generated - 1))
        self.prompt_tokens.observe(prompt)
        self.generation_tokens.observe(generated)

    # Steps

    def planned(self, seconds: float) -> None:
        """So long took the scheduler to plan, or to find nothing to plan."""
        self._planning += seconds

    def landed(self, work: Work, busy: float, gap: float, scheduling: float, now: float) -> None:
        """The results of a step are in. `busy` and `gap` are the worker's, `scheduling` is what taking them in took."""
        kind = "mixed" if work.prefilled and work.decoded else "prefill" if work.prefilled else "decode"
        self.step_duration[kind].observe(busy)
        self.step_gap.observe(gap)
        self.step_tokens.observe(work.prefilled + work.decoded)
        self.scheduling.observe(self._planning + scheduling)
        self._planning = 0.0
        if work.continued:
            self.inter_token.observe(now - self._landed, work.continued)
        self._landed = now
