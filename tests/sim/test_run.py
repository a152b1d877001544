"""Whole simulations: the real scheduler, a pretend device, a virtual clock."""

import time

import numpy as np
import pytest

from toka.core.admission import POLICIES
from toka.core.limits import Limits
from toka.errors import ConfigError
from toka.sim.cost import Costs
from toka.sim.report import Report, report
from toka.sim.run import Hydragen, Setup, Simulation
from toka.sim.workload import SHAREGPT, Asked, Lognormal, Shape, Workload, synthetic

COSTS = Costs(step=1e-3, row=1e-6, kv_token=1e-9, prefill_token=1e-6, prefill_pair=0.0)
SMALL = Shape(own=Lognormal(60, 1.0, 4, 400), output=Lognormal(40, 0.8, 1, 200))
ONE = Shape(own=Lognormal(30, 0, 1, 30), output=Lognormal(10, 0, 1, 10))


def setup(
    workload: Workload,
    *,
    num_blocks: int = 200,
    policy: str = "predicted",
    costs: Costs = COSTS,
    replicas: int = 1,
    engines: int = 1,
    hydragen: Hydragen | None = None,
) -> Setup:
    limits = Limits(
        num_blocks=num_blocks, page_size=16, max_seqs=64, max_tokens=512, max_ahead=16, max_len=workload.longest
    )
    return Setup(costs, limits, POLICIES[policy], hydragen, replicas, engines)


def simulate(workload: Workload, setup: Setup) -> tuple[Simulation, Report]:
    simulation = Simulation(workload, setup)
    simulation.run()
    for replica in simulation._replicas:
        replica.scheduler.check()
        assert not replica.scheduler.running + replica.scheduler.waiting
    return simulation, report(simulation, wall=0.0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_sequence_gets_exactly_its_tokens(policy: str, replicas: int) -> None:
    """Whatever the policy and the number of replicas: what the workload says, up to max_tokens."""
    workload = synthetic(SMALL._replace(samples=2), Asked(90), 150, seed=1)
    simulation, figures = simulate(workload, setup(workload, policy=policy, replicas=replicas))
    assert figures.output_tokens == workload.outputs.sum()
    assert (simulation.meter.ended >= simulation.meter.first).all()
    assert (simulation.meter.first > simulation.meter.arrived).all()


def test_one_seed_one_result() -> None:
    """Two runs differ in nothing but the time that they take."""
    for rate, concurrency in ((None, None), (300.0, None), (None, 20)):
        workload = synthetic(SMALL, Asked(), 120, seed=4).arriving(rate=rate, concurrency=concurrency, seed=4)
        first, again = (simulate(workload, setup(workload, replicas=2)) for _ in range(2))
        assert first[1] == again[1]
        assert (first[0].meter.ended == again[0].meter.ended).all()


def test_time_is_virtual() -> None:
    """Hours pass in no time."""
    workload = synthetic(ONE, Asked(), 20, seed=0)
    slow = Costs(step=600.0, row=0.0, kv_token=0.0, prefill_token=0.0, prefill_pair=0.0)
    started = time.monotonic()
    _, figures = simulate(workload, setup(workload, costs=slow))
    assert figures.seconds > 3600
    assert time.monotonic() - started < 10


def test_a_lone_request_takes_its_steps() -> None:
    """Ten steps one after the other; the way there and back once, since plans are sent ahead; the engine's work."""
    workload = synthetic(ONE, Asked(10), 1, seed=0)
    costs = Costs(step=0.010, row=0.0, kv_token=0.0, prefill_token=0.0, prefill_pair=0.0, round_trip=0.004)
    _, figures = simulate(workload, setup(workload, costs=costs))
    assert figures.seconds == pytest.approx(0.004 + 10 * 0.010)
    assert figures.ttft.p50 == pytest.approx(0.004 + 0.010)
    assert figures.itl.p99 == pytest.approx(0.010, rel=0.005)
    assert figures.steps == 10


def test_an_engine_does_one_thing_at_a_time() -> None:
    """Two replicas of one engine that is slower than their devices take as long as all of their steps, one by one."""
    workload = synthetic(ONE, Asked(10), 64, seed=0)
    costs = Costs(step=1e-6, row=0.0, kv_token=0.0, prefill_token=0.0, prefill_pair=0.0, engine_step=0.01)
    _, shared = simulate(workload, setup(workload, costs=costs, replicas=2, engines=1))
    _, own = simulate(workload, setup(workload, costs=costs, replicas=2, engines=2))
    assert shared.seconds == pytest.approx(0.01 * shared.steps, rel=0.02)
    assert own.seconds < 0.6 * shared.seconds
    assert shared.engine_busy == pytest.approx(1, abs=0.01)


def test_poisson_requests_start_when_they_arrive() -> None:
    """At a rate that is no load each one is alone."""
    workload = synthetic(ONE, Asked(10), 40, seed=0).arriving(rate=2.0, concurrency=None, seed=0)
    simulation, figures = simulate(workload, setup(workload))
    assert np.allclose(simulation.meter.arrived, workload.arrival)
    assert figures.latency.p99 < 0.1
    assert figures.batch == pytest.approx(1, abs=0.2)


def test_a_closed_loop_keeps_so_many_open() -> None:
    """Never more than asked for, and the next comes when one ends."""
    workload = synthetic(ONE, Asked(10), 40, seed=0).arriving(rate=None, concurrency=8, seed=0)
    simulation, _ = simulate(workload, setup(workload))
    meter = simulation.meter
    for moment in meter.arrived:
        assert ((meter.arrived <= moment) & (moment < meter.ended)).sum() <= 8
    assert len(np.unique(meter.arrived)) == 40 // 8


def test_samples_of_a_prompt_prefill_it_once() -> None:
    """All but each one's last block comes from the prefix cache."""
    shape = ONE._replace(own=Lognormal(100, 0, 1, 100), samples=16)
    workload = synthetic(shape, Asked(20), 4, seed=0)
    _, figures = simulate(workload, setup(workload))
    assert figures.hit_rate == pytest.approx(15 / 16 * 96 / 100)


def test_groups_share_their_prefix() -> None:
    """A prefix of 64 tokens is prefilled once for each group."""
    shape = ONE._replace(prefix=64, groups=2)
    workload = synthetic(shape, Asked(20), 50, seed=0)
    _, figures = simulate(workload, setup(workload, num_blocks=400))
    assert figures.hit_rate == pytest.approx(48 * 64 / (50 * 94))


def test_hydragen_reads_a_shared_prefix_once() -> None:
    """Where reading is all that costs, sixteen samples behind a long prompt take little longer than one."""
    shape = ONE._replace(own=Lognormal(512, 0, 1, 512), output=Lognormal(30, 0, 1, 30), samples=16)
    workload = synthetic(shape, Asked(30), 1, seed=0)
    costs = Costs(step=0.0, row=0.0, kv_token=1e-6, prefill_token=0.0, prefill_pair=0.0)
    seconds = [
        simulate(workload, setup(workload, costs=costs, hydragen=hydragen))[1].seconds
        for hydragen in (None, Hydragen(256, 8))
    ]
    assert seconds[0] > 7 * seconds[1]


def test_reserving_never_preempts_and_grabbing_does() -> None:
    """The two ends between which a prediction lies: the one recomputes nothing, the other fills the cache."""
    workload = synthetic(SHAREGPT, Asked(1024), 200, seed=0)
    costs = Costs(step=0.010, row=0.0, kv_token=0.0, prefill_token=0.0, prefill_pair=0.0)
    setups = {policy: setup(workload, num_blocks=1000, policy=policy, costs=costs) for policy in POLICIES}
    reports = {policy: simulate(workload, one)[1] for policy, one in setups.items()}
    reserved, predicted, greedy = reports["reserved"], reports["predicted"], reports["greedy"]
    assert reserved.preemptions == 0
    assert reserved.recomputed == 0
    assert reserved.kv_use < predicted.kv_use < 1
    assert greedy.preemptions > predicted.preemptions
    assert greedy.recomputed > predicted.recomputed


def test_requests_go_where_there_is_least_to_do() -> None:
    """And evenly, when all are alike."""
    workload = synthetic(ONE, Asked(10), 30, seed=0)
    simulation = Simulation(workload, setup(workload, replicas=3))
    simulation.run()
    assert min(replica.scheduler.steps for replica in simulation._replicas) > 5


def test_a_request_that_no_replica_could_hold_is_refused() -> None:
    """Before anything runs."""
    workload = synthetic(SHAREGPT, Asked(1024), 10, seed=0)
    with pytest.raises(ConfigError, match="num_blocks"):
        Simulation(workload, setup(workload, num_blocks=20))
