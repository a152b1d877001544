"""Several tenants in one simulation: what each asks for, and what it got."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from toka.errors import ConfigError
from toka.sim.report import Percentiles
from toka.sim.run import Simulation
from toka.sim.workload import Workload


class Tenant(NamedTuple):
    """What one of them asks for."""

    name: str
    requests: int
    weight: float = 1.0
    batch: bool = False
    """In the batch lane."""


def tenants_of(text: str) -> list[Tenant]:
    """From `NAME:REQUESTS`, `NAME:REQUESTS:WEIGHT` and `NAME:REQUESTS:batch`, between commas. Raises ConfigError."""
    tenants: list[Tenant] = []
    for word in text.split(","):
        name, _, rest = word.strip().partition(":")
        requests, _, last = rest.partition(":")
        try:
            batch = last == "batch"
            one = Tenant(name, int(requests), 1.0 if batch or not last else float(last), batch)
        except ValueError:
            one = Tenant("", 0)
        if not one.name or one.requests < 1 or not 0 < one.weight < np.inf:
            raise ConfigError(f"tenants={text}: {word.strip()!r} is not NAME:REQUESTS, perhaps with :WEIGHT or :batch")
        tenants.append(one)
    if len({one.name for one in tenants}) < len(tenants):
        raise ConfigError(f"tenants={text}: a name stands there twice")
    return tenants


def owned(workload: Workload, tenants: list[Tenant]) -> Workload:
    """The workload's first requests are the first tenant's, and so on; there are as many as they ask for together."""
    return replace(
        workload,
        tenant=tuple(one.name for one in tenants for _ in range(one.requests)),
        batch=tuple(one.batch for one in tenants for _ in range(one.requests)),
    )


def tenant_lines(simulation: Simulation) -> list[str]:
    """A line a tenant: how long its requests took, and how much of what the devices made was for it as long as all of
    them had some that had not begun. Nothing for one tenant alone."""
    workload, meter = simulation.workload, simulation.meter
    names = list(dict.fromkeys(workload.tenant))
    if len(names) < 2:
        return []
    owner = np.repeat(np.array(workload.tenant), workload.samples)
    begun = min(float(meter.first[owner == name].max()) for name in names)
    # Tokens of a sequence come evenly, near enough, between its first and its last.
    part = (begun - meter.first) / np.maximum(meter.ended - meter.first, 1e-9)
    made = np.clip(part, 0, 1) * workload.outputs
    rows = [["tenant", "sequences", "tokens while all wait", "TTFT p50 / p90 / p99, ms", "latency p50 / p90 / p99, ms"]]
    for name in names:
        mine = owner == name
        ttft = Percentiles.of((meter.first - meter.arrived)[mine])
        latency = Percentiles.of((meter.ended - meter.arrived)[mine])
        share = made[mine].sum() / max(made.sum(), 1e-9)
        rows.append([name or "(none)", f"{mine.sum():,}", f"{share:.1%}", str(ttft), str(latency)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
