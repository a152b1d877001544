"""What runs beside the engine for the metrics' sake."""

import asyncio

from toka.metrics import lag
from toka.metrics.record import Metrics
from toka.metrics.report import Report
from toka.metrics.statsd import Statsd


async def attend(metrics: Metrics, statsd: Statsd | None) -> None:
    """Watch the event loop, report in the log and to statsd, as the options say, for ever."""
    async with asyncio.TaskGroup() as group:
        group.create_task(lag.watch(metrics), name="event loop lag")
        if seconds := metrics.config.stats_report_seconds:
            group.create_task(Report(metrics).run(seconds), name="statistics")
        if statsd:
            group.create_task(statsd.run(metrics), name="statsd")
