"""The line of statistics in the log, while something runs."""

import asyncio
import logging
from typing import NamedTuple, Self

from toka.metrics.record import Metrics

log = logging.getLogger("toka.stats")


class Reading(NamedTuple):
    """The counters at one moment; `at` in seconds of the metrics' clock."""

    at: float
    prompt: int
    generated: int
    queries: int
    hits: int
    preemptions: int

    @classmethod
    def of(cls, metrics: Metrics) -> Self:
        """Now."""
        counts = metrics.counts
        return cls(
            at=metrics.clock(),
            prompt=counts.computed + counts.cached,
            generated=counts.generated,
            queries=counts.queries,
            hits=counts.hits,
            preemptions=counts.preemptions,
        )


class Report:
    """What has changed from line to line."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last = Reading.of(metrics)

    def line(self) -> str | None:
        """What to say of the time since the last call; None: nothing ran, and nothing runs or waits."""
        before, self._last = self._last, Reading.of(self._metrics)
        now, state = self._last, self._metrics.state()
        if not (state.running or state.waiting or now.generated - before.generated or now.prompt - before.prompt):
            return None
        seconds = max(now.at - before.at, 1e-9)
        queries, preemptions = now.queries - before.queries, now.preemptions - before.preemptions
        hits = f"{(now.hits - before.hits) / queries:.0%} of prompts cached, " if queries else ""
        return (
            f"{state.running:,} running, {state.waiting:,} waiting; "
            f"{(now.prompt - before.prompt) / seconds:,.0f} tokens/s in, "
            f"{(now.generated - before.generated) / seconds:,.0f} out; "
            f"KV cache {state.usage:.0%} used, {hits}{preemptions:,} preempted"
        )

    async def run(self, seconds: float) -> None:
        """A line every so many seconds, for ever."""
        while True:
            await asyncio.sleep(seconds)
            if line := self.line():
                log.info("%s", line)
