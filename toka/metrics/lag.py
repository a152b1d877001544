"""How long the event loop is held: a timer that is late tells."""

import asyncio

from toka.metrics.record import Metrics

PERIOD = 0.1
"""Seconds between looks."""


async def watch(metrics: Metrics) -> None:
    """Observe how late each look is, for ever."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + PERIOD
        await asyncio.sleep(PERIOD)
        metrics.loop_lag.observe(max(0.0, loop.time() - due))
