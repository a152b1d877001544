"""A simulation's figures, and how a person reads them."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from toka.sim.meter import QUANTILES
from toka.sim.run import Simulation
from toka.sim.workload import Floats


class Percentiles(NamedTuple):
    """Seconds."""

    p50: float
    p90: float
    p99: float

    def __str__(self) -> str:
        return " / ".join(f"{1000 * value:,.{1 if value < 1 else 0}f}" for value in self)

    @classmethod
    def of(cls, seconds: Floats) -> "Percentiles":
        """Of some durations."""
        return cls(*(float(value) for value in np.quantile(seconds, QUANTILES)))


class Report(NamedTuple):
    """What one simulation showed."""

    requests: int
    sequences: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    """Until the last answer."""
    output_rate: float
    """Output tokens a second."""
    request_rate: float
    ttft: Percentiles
    """From a request's arrival to a sequence's first token."""
    itl: Percentiles
    """Between two tokens of a sequence."""
    latency: Percentiles
    """From a request's arrival to a sequence's last token."""
    kv_use: float
    """Share of the blocks that running sequences refer to, on average from the end of the first whole second to the
    start of the last one."""
    kv_use_loaded: float
    """The same over the whole seconds at each moment of which somebody waited, but for the first; 0 without any."""
    loaded_seconds: int
    """How many those are."""
    batch: float
    """Sequences that got a token, on average over the steps."""
    steps: int
    preemptions: int
    recomputed: float
    """Prompt tokens and generated ones that were run again after a preemption, as a share of all these."""
    hit_rate: float
    """Share of prompt tokens that sequences found in the prefix cache."""
    wasted: float
    """Share of rows that were run for sequences that had ended."""
    device_busy: float
    """Share of the time."""
    engine_busy: float
    wall: float
    """Seconds that the simulation took."""


def report(simulation: Simulation, wall: float) -> Report:
    """The figures of a simulation that has run, in `wall` seconds."""
    meter, workload, setup, totals = simulation.meter, simulation.workload, simulation.setup, simulation.totals
    series = meter.series()
    blocks = setup.replicas * setup.limits.num_blocks
    seconds = float(meter.ended.max())
    loaded = series.loaded.copy()
    loaded[:1] = False
    tokens = workload.prompt_tokens + meter.tokens
    return Report(
        requests=workload.requests,
        sequences=len(workload.output),
        prompt_tokens=workload.prompt_tokens,
        output_tokens=meter.tokens,
        seconds=seconds,
        output_rate=meter.tokens / seconds,
        request_rate=workload.requests / seconds,
        ttft=Percentiles.of(meter.first - meter.arrived),
        itl=Percentiles(*map(meter.gaps.quantile, QUANTILES)),
        latency=Percentiles.of(meter.ended - meter.arrived),
        kv_use=_mean(series.used[1:-1]) / blocks,
        kv_use_loaded=_mean(series.used[loaded]) / blocks,
        loaded_seconds=int(loaded.sum()),
        batch=meter.tokens / meter.steps,
        steps=meter.steps,
        preemptions=totals.preemptions,
        recomputed=meter.recomputed / tokens,
        hit_rate=totals.cached / workload.prompt_tokens,
        wasted=1 - meter.tokens / meter.rows,
        device_busy=totals.busy / totals.through / setup.replicas,
        engine_busy=totals.engine_busy / totals.through / setup.engines,
        wall=wall,
    )


def lines(reports: Mapping[str, Report]) -> list[str]:
    """A table with a column for each report, under its name."""
    columns = [["", *reports]]
    for label, shown in ROWS.items():
        columns.append([label, *(shown.format(**one._asdict()) for one in reports.values())])
    widths = [max(len(row[index]) for row in columns) for index in range(len(columns[0]))]
    return [
        "  ".join(
            cell.ljust(width) if not index else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in columns
    ]


ROWS = {
    "requests": "{requests:,}",
    "sequences": "{sequences:,}",
    "prompt tokens": "{prompt_tokens:,}",
    "output tokens": "{output_tokens:,}",
    "simulated time, s": "{seconds:,.2f}",
    "output tokens/s": "{output_rate:,.0f}",
    "requests/s": "{request_rate:,.1f}",
    "TTFT p50 / p90 / p99, ms": "{ttft}",
    "ITL p50 / p90 / p99, ms": "{itl}",
    "latency p50 / p90 / p99, ms": "{latency}",
    "KV use, first to last whole second": "{kv_use:.2%}",
    "KV use while requests waited": "{kv_use_loaded:.2%}",
    "seconds in which requests waited": "{loaded_seconds:,}",
    "batch, mean over steps": "{batch:,.1f}",
    "steps": "{steps:,}",
    "preemptions": "{preemptions:,}",
    "tokens recomputed": "{recomputed:.2%}",
    "prefix hit rate": "{hit_rate:.2%}",
    "rows run after the end": "{wasted:.2%}",
    "device busy": "{device_busy:.1%}",
    "engine busy": "{engine_busy:.1%}",
    "wall time of the simulation, s": "{wall:,.1f}",
}


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0
