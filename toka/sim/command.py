"""`toka simulate`: what would happen, without a GPU and without waiting for it."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from toka.config import AtLeastOne, Config
from toka.core.admission import POLICIES
from toka.core.limits import Limits
from toka.errors import ConfigError
from toka.options import build, from_words, help_lines, shown_value
from toka.screen import Screen
from toka.sim.cost import Costs, fit, measured
from toka.sim.meter import Series
from toka.sim.plot import draw, require
from toka.sim.report import Report, lines, report
from toka.sim.run import Hydragen, Setup, Simulation
from toka.sim.tenants import Tenant, owned, tenant_lines, tenants_of
from toka.sim.workload import MONKEYS, SHAREGPT, Asked, Shape, Workload, replayed, synthetic


class Simulate(Struct, frozen=True, kw_only=True):
    """The options of `toka simulate`."""

    workload: Annotated[
        Literal["sharegpt", "monkeys", "trace"],
        Meta(
            description="sharegpt: chats of lognormal lengths, 213 tokens in and 201 out on average; monkeys: 64 "
            "samples of each question of 96 tokens, behind one prefix of 1,024; trace: what trace=FILE says"
        ),
    ] = "sharegpt"
    trace: Annotated[
        str | None,
        Meta(
            description="file of JSON objects, one a line: arrival (seconds), input_tokens, output_tokens, and perhaps "
            "max_tokens, group, prefix_tokens (of the input, shared with its group), tenant, batch (true: its lane)"
        ),
    ] = None
    requests: Annotated[
        AtLeastOne | None, Meta(description="how many; default: 2,000, or 128 of monkeys, or all of the trace")
    ] = None
    tenants: Annotated[
        str | None,
        Meta(
            description="whose requests they are, instead of requests: NAME:REQUESTS or NAME:REQUESTS:WEIGHT or "
            "NAME:REQUESTS:batch, for the batch lane, with commas between them; they come in this order"
        ),
    ] = None
    rate: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="requests a second, a Poisson process; default: all at once, or as the trace says"),
    ] = None
    concurrency: Annotated[
        AtLeastOne | None, Meta(description="requests open at any time: each answer lets the next one in")
    ] = None
    n: Annotated[AtLeastOne | None, Meta(description="samples of each prompt; default: the workload's")] = None
    prefix: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="tokens that the prompts of a group begin with; default: the workload's"),
    ] = None
    groups: Annotated[int, Meta(ge=1, description="groups of prompts that begin alike")] = 1
    max_tokens: Annotated[
        AtLeastOne | None,
        Meta(description="what each request asks for; None: the longest answer it will get, times 1 + e^(spread · x)"),
    ] = 1024
    spread: Annotated[
        float, Meta(ge=0, description="how unevenly requests ask for too much, with max_tokens=None; x is normal")
    ] = 0.5
    seed: Annotated[int, Meta(ge=0, description="one seed, one result")] = 0
    costs: Annotated[str, Meta(description="TOML file of what a step costs, or the name of one in toka/sim/costs")] = (
        "h200-1b"
    )
    fit: Annotated[
        str | None,
        Meta(
            description="print costs for measured steps instead: a file of JSON objects, one a line, with seconds, "
            "rows, kv_tokens, prefill_tokens, prefill_pairs"
        ),
    ] = None
    num_blocks: Annotated[int, Meta(ge=1, description="blocks of KV cache of a replica")] = 65536
    page_size: Annotated[int, Meta(ge=1, le=256, description="tokens in a block")] = Config().page_size
    max_seqs_per_forward: Annotated[int, Meta(ge=1, le=16384, description="sequences in one step")] = (
        Config().max_seqs_per_forward
    )
    max_tokens_per_forward: Annotated[int, Meta(ge=1, le=1048576, description="tokens in one step")] = (
        Config().max_tokens_per_forward
    )
    max_ahead: Annotated[int, Meta(ge=1, le=64, description="steps sent ahead of their results, at most")] = 16
    admission: Annotated[
        Literal["predicted", "reserved", "greedy", "all"],
        Meta(
            description="what a sequence must find room for to start: its predicted length, all of its max_tokens, or "
            "its prompt alone; all: the three side by side"
        ),
    ] = "predicted"
    use_hydragen: Annotated[bool, Meta(description="read a prefix that sequences share once for all of them")] = False
    hydragen_min_group_size: Annotated[int, Meta(ge=1, description="sequences that make a Hydragen group")] = 32
    hydragen_min_prefix_len: Annotated[int, Meta(ge=1, description="tokens that make a shared prefix")] = 256
    replicas: Annotated[int, Meta(ge=1, description="copies of the model")] = 1
    engines: Annotated[int, Meta(ge=1, description="engine processes that share the replicas out")] = 1
    plot: Annotated[str | None, Meta(description="PNG to draw the seconds of the simulation to")] = None


def main(arguments: Sequence[str], screen: Screen) -> None:
    """Simulate and print. Raises ConfigError."""
    if any(word in ("--help", "-h") for word in arguments):
        screen.line("\n".join(["toka simulate [key=value …]", "", *help_lines(Simulate)]))
        return
    options = build(Simulate, from_words(arguments))
    if options.fit is not None:
        screen.write(fit(measured(Path(options.fit).expanduser())).toml())
        return
    if options.plot is not None:
        require(Path(options.plot).expanduser())
    workload = workload_of(options)
    reports: dict[str, Report] = {}
    series: dict[str, Series] = {}
    tenants: dict[str, list[str]] = {}
    for policy in POLICIES if options.admission == "all" else [options.admission]:
        started = time.perf_counter()
        simulation = Simulation(workload, setup_of(options, workload, policy))
        simulation.run()
        reports[policy] = report(simulation, time.perf_counter() - started)
        series[policy] = simulation.meter.series()
        tenants[policy] = tenant_lines(simulation)
    screen.line(headline(options, workload))
    screen.line("\n".join(lines(reports)))
    for policy, rows in tenants.items():
        if rows:
            screen.line("\n".join([f"{policy}:" if len(tenants) > 1 else "", *rows]))
    if options.plot is not None:
        blocks = options.replicas * options.num_blocks
        draw(Path(options.plot).expanduser(), headline(options, workload), series, blocks)
        screen.line(f"drawn to {options.plot}")


def workload_of(options: Simulate) -> Workload:
    """What clients ask for. Raises ConfigError for options that contradict each other."""
    if options.rate is not None and options.concurrency is not None:
        raise ConfigError("rate=… and concurrency=… are two ways for requests to arrive; give one of them")
    if (options.workload == "trace") != (options.trace is not None):
        raise ConfigError("workload=trace and trace=FILE go together")
    asked = Asked(options.max_tokens, options.spread)
    tenants = _tenants(options)
    if options.trace is not None:
        if options.n is not None or options.prefix is not None or tenants:
            raise ConfigError("n=…, prefix=… and tenants=… do not go with a trace")
        traced = replayed(Path(options.trace).expanduser(), asked, options.requests, options.seed)
        if options.rate is None and options.concurrency is None:
            return traced
        return traced.arriving(rate=options.rate, concurrency=options.concurrency, seed=options.seed)
    shape, requests = (SHAREGPT, 2000) if options.workload == "sharegpt" else (MONKEYS, 128)
    requests = sum(one.requests for one in tenants) or options.requests or requests
    drawn = synthetic(changed(shape, options), asked, requests, options.seed)
    if tenants:
        drawn = owned(drawn, tenants)
    return drawn.arriving(rate=options.rate, concurrency=options.concurrency, seed=options.seed)


def _tenants(options: Simulate) -> list[Tenant]:
    if options.tenants is None:
        return []
    if options.requests is not None:
        raise ConfigError("tenants=… says how many requests there are; leave requests=… out")
    return tenants_of(options.tenants)


def changed(shape: Shape, options: Simulate) -> Shape:
    """The workload's shape, but for what was asked to be otherwise."""
    return shape._replace(
        samples=shape.samples if options.n is None else options.n,
        prefix=shape.prefix if options.prefix is None else options.prefix,
        groups=options.groups,
    )


def setup_of(options: Simulate, workload: Workload, policy: str) -> Setup:
    """What runs it."""
    return Setup(
        costs=Costs.load(options.costs),
        limits=Limits(
            num_blocks=options.num_blocks,
            page_size=options.page_size,
            max_seqs=min(options.max_seqs_per_forward, options.max_tokens_per_forward),
            max_tokens=options.max_tokens_per_forward,
            max_ahead=options.max_ahead,
            max_len=workload.longest,
        ),
        policy=POLICIES[policy],
        hydragen=Hydragen(options.hydragen_min_prefix_len, options.hydragen_min_group_size)
        if options.use_hydragen
        else None,
        replicas=options.replicas,
        engines=min(options.engines, options.replicas),
        weights={one.name: one.weight for one in _tenants(options)},
    )


def headline(options: Simulate, workload: Workload) -> str:
    """What was simulated, in one line."""
    if workload.concurrency is not None:
        arrivals = f"{workload.concurrency:,} open at a time"
    elif options.rate is not None:
        arrivals = f"{options.rate:g} a second"
    else:
        arrivals = "as traced" if options.trace is not None else "all at once"
    asked = f"max_tokens={options.max_tokens}" + (f", spread={options.spread:g}" if options.max_tokens is None else "")
    return (
        f"{options.workload}, {workload.requests:,} requests, {arrivals}, {asked}, seed={options.seed}; "
        f"{options.replicas:,} × {options.num_blocks:,} blocks of {options.page_size}, "
        f"max_seqs_per_forward={options.max_seqs_per_forward}, use_hydragen={shown_value(options.use_hydragen)}, "
        f"costs={options.costs}"
    )
