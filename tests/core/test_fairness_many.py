"""Fairness between tenants, and the batch lane's place, in whole runs of the scheduler."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.replica import BOLD, VOCAB, Replica, expected, limits
from toka.core.admission import Policy
from toka.core.fleet import Fleet
from toka.core.ledger import BATCH_SHARE, GENERATED, PROMPT, Ledger
from toka.core.limits import Limits
from toka.core.prompt import Prompt
from toka.core.scheduler import Scheduler
from toka.core.sequence import BATCH, Sequence
from toka.sim.cost import Costs
from toka.sim.device import NO_END, STOP_ID, Device
from toka.sim.worker import PretendWorker
from toka.wire import Tokens

COSTS = Costs(step=2e-3, row=2e-6, kv_token=1e-9, prefill_token=2e-6, prefill_pair=0.0)
LIMITS = Limits(num_blocks=4000, page_size=16, max_seqs=256, max_tokens=2048, max_ahead=4, max_len=1024)


def had(replica: Replica, sequence: Sequence) -> float:
    """Weighted tokens that a sequence has been served."""
    if not sequence.starts:
        return 0.0
    seats = replica.scheduler.seats
    made = int(seats.returned[sequence.seat]) if sequence.seat >= 0 else sequence.kept
    if sequence in replica.ends:
        made = len(replica.seen[sequence])
    return PROMPT * (len(sequence.prompt) - sequence.cached) + GENERATED * made


@given(
    weight=st.sampled_from([1.0, 2.0, 3.0]),
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=2, max_size=12),
    few=st.integers(1, 6),
    policy=st.sampled_from([Policy(), BOLD]),
)
@settings(max_examples=150, deadline=None)
def test_backlogged_tenants_are_served_by_their_weights(
    weight: float, shapes: list[tuple[int, int]], few: int, policy: Policy
) -> None:
    """At every moment at which both have work waiting, whatever their requests look like: to within twice a cache full
    of generated tokens, which is theorem 4.4."""
    replica = Replica(limits(num_blocks=40, max_seqs=6, max_tokens=24), policy)
    replica.scheduler.ledger._weights["a"] = weight
    mine: dict[str, list[Sequence]] = {"a": [], "b": []}
    open_ones: dict[str, deque[Sequence]] = {"a": deque(), "b": deque()}
    done = {"a": 0.0, "b": 0.0}
    bound = 2 * max(PROMPT * 40, GENERATED * 40 * 4)
    turn = 0
    for _ in range(300):
        for tenant, lengths in (("a", shapes[:few]), ("b", shapes[few:] or shapes)):
            while replica.scheduler.queue.held(tenant).sequences < 8:
                prompt, limit = lengths[turn % len(lengths)]
                turn += 1
                sequence = replica.sequence(prompt, limit, tenant=tenant)
                mine[tenant].append(sequence)
                open_ones[tenant].append(sequence)
        replica.plan()
        assert replica.land()
        for tenant, ones in open_ones.items():
            while ones and ones[0] in replica.ends:
                done[tenant] += had(replica, ones.popleft())
        a, b = (done[tenant] + sum(had(replica, one) for one in open_ones[tenant]) for tenant in "ab")
        assert abs(a / weight - b) <= bound
    assert a + b > 2 * bound
    replica.run()
    for sequence in mine["a"] + mine["b"]:
        assert replica.seen[sequence] == expected(sequence)


class Clock:
    """A scheduler and a pretend device in virtual time; sequence `seed` generates `ends[seed]` tokens."""

    def __init__(self, ends: list[int], sizes: Limits = LIMITS) -> None:
        self.scheduler = Scheduler(sizes)
        self.ends = np.array(ends, dtype=np.int64)
        self.device = Device(sizes.max_seqs, sizes.page_size, self.ends, np.zeros(len(ends), dtype=np.int64))
        self.made = 0
        self.now = 0.0
        self.over: dict[Sequence, float] = {}

    def submit(self, tenant: str, prompt: int = 50, priority: int = 0, limit: int = 200) -> Sequence:
        ids = np.full(prompt, self.made, dtype=np.int32)
        sequence = Sequence(
            Prompt(ids), limit=limit, stops=(STOP_ID,), seed=self.made, tenant=tenant, priority=priority
        )
        self.made += 1
        self.scheduler.submit(sequence)
        return sequence

    def step(self) -> None:
        plan = self.scheduler.plan()
        assert plan is not None
        sampled = self.device.run(plan)
        seconds = COSTS.seconds(sampled.work)
        self.now += seconds
        progress = self.scheduler.apply(Tokens(epoch=0, step=plan.step, ids=sampled.ids, busy=seconds))
        self.over.update((ended.sequence, self.now) for ended in progress.ended)

    def serve(self, sequences: list[Sequence]) -> tuple[float, float]:
        """Until they have ended: seconds until the last of them has started, and until the last has ended."""
        began, started = self.now, 0.0
        while any(one not in self.over for one in sequences):
            self.step()
            if not started and all(one.starts for one in sequences):
                started = self.now - began
        return started, self.now - began


def test_ten_requests_do_not_wait_behind_a_hundred_thousand() -> None:
    """They start within a few steps and end within three times what an empty engine takes, while more than 95,000 of
    the other tenant's still wait."""
    lengths = np.random.default_rng(1).integers(10, 100, 100_011).tolist()
    empty = Clock(lengths)
    _, alone = empty.serve([empty.submit("few") for _ in range(10)])
    clock = Clock(lengths)
    for _ in range(100_000):
        clock.submit("many")
    while len(clock.over) < 2000:
        clock.step()
    step = clock.now / clock.scheduler.steps
    started, ended = clock.serve([clock.submit("few") for _ in range(10)])
    assert started < 8 * step
    assert ended < 3 * alone
    assert clock.scheduler.waiting > 95_000
    clock.scheduler.check()


def test_one_tenant_is_served_in_the_order_of_arrival() -> None:
    """Named or not, and whoever else has been there."""
    replica = Replica(limits(max_seqs=1))
    other = replica.sequence(3, 2, tenant="other")
    replica.run()
    order = [replica.sequence(1 + index * 5 % 13, 2, tenant="one") for index in range(9)]
    replica.run()
    assert list(replica.ends) == [other, *order]


def test_who_has_been_served_most_is_preempted_first() -> None:
    """Not who came last: that would always be the tenant with the few requests."""
    replica = Replica(limits(num_blocks=30, max_seqs=4), BOLD)
    many = [replica.sequence(3, 100, tenant="many") for _ in range(3)]
    for _ in range(12):
        replica.plan()
        replica.land()
    few = replica.sequence(3, 30, tenant="few")
    replica.run()
    assert replica.scheduler.preemptions
    assert few.starts == 1
    for sequence in [*many, few]:
        assert replica.seen[sequence] == expected(sequence)


def test_a_large_head_holds_up_its_own_tenant_first() -> None:
    """Other tenants' small sequences pass it, a bounded number of times: it starts in the end."""
    replica = Replica(limits(num_blocks=40, max_seqs=4, max_tokens=64))
    replica.sequence(4, 100, tenant="a")
    replica.plan()
    large = replica.sequence(100, 50, tenant="a")
    small = [replica.sequence(3, 4, tenant="ab"[index % 2]) for index in range(300)]
    replica.run()
    order = list(replica.ends)
    assert order.index(small[1]) < order.index(large) < 200


@pytest.mark.parametrize("prompt", [40, 900])
def test_the_batch_lane_gets_its_share_and_no_more(prompt: int) -> None:
    """While the others have more to do than the engine can, the batch lane has about the share that it is owed, of
    tokens by their weight, in short pieces and in long ones."""
    clock = Clock([NO_END] * 20_000, LIMITS._replace(max_seqs=64))
    online, batch = [], []
    while clock.scheduler.steps < 2000:
        while clock.scheduler.waiting_batch < 4:
            batch.append(clock.submit("night", prompt, BATCH, limit=60))
        while clock.scheduler.waiting < 40:
            online.append(clock.submit("day", 50, limit=40))
        clock.step()
    assert all(not one.vested for one in online)

    def served(ones: list[Sequence]) -> float:
        return sum(PROMPT * len(one.prompt) + GENERATED * one.limit for one in ones if one in clock.over)

    share = served(batch) / served(online)
    assert BATCH_SHARE / 2 < share < BATCH_SHARE * 1.5
    clock.scheduler.check()


def test_the_batch_lane_takes_all_that_is_idle() -> None:
    """Without anybody else it fills the batch, whatever it is owed."""
    clock = Clock([NO_END] * 400)
    for _ in range(300):
        clock.submit("night", 20, BATCH, limit=50)
    for _ in range(5):
        clock.step()
    assert clock.scheduler.running == LIMITS.max_seqs


def test_the_batch_lane_leaves_room_for_the_next() -> None:
    """An eighth of what the others have: one of them that comes now starts at once, and nobody gives way to it."""
    clock = Clock([NO_END] * 400, LIMITS._replace(max_seqs=64))
    for _ in range(16):
        clock.submit("day", 20, limit=150)
    clock.step()
    for _ in range(300):
        clock.submit("night", 20, BATCH, limit=50)
    for _ in range(10):
        clock.step()
    assert clock.scheduler.running == 62
    late = clock.submit("day", 20, limit=10)
    clock.step()
    assert late.starts == 1
    assert clock.scheduler.preemptions == 0


def test_a_long_prompt_of_the_batch_lane_does_not_hold_up_others() -> None:
    """Its chunks come after theirs in every step, though it has begun."""
    replica = Replica(limits(num_blocks=200, max_tokens=16))
    batch = replica.sequence(300, 2, priority=BATCH)
    replica.plan()
    online = replica.sequence(12, 2)
    replica.plan()
    assert replica.scheduler.seats.filled[online.seat] == 12
    replica.run()
    assert list(replica.ends) == [online, batch]


def test_what_the_share_has_paid_for_runs_to_its_end() -> None:
    """A sequence of the batch lane that started from the lane's share does not give way, another does."""
    replica = Replica(limits(num_blocks=400, max_seqs=2))
    replica.scheduler.ledger.account(Sequence(Prompt(np.zeros(1, dtype=np.int32)), limit=1, priority=BATCH))
    paid = replica.sequence(8, 60, priority=BATCH)
    replica.scheduler.ledger.owed = 50.0
    replica.plan()
    idle = replica.sequence(8, 60, priority=BATCH)
    replica.plan()
    assert (paid.vested, idle.vested) == (True, False)
    for _ in range(3):
        replica.sequence(8, 20)
    replica.run()
    assert (paid.starts, idle.starts) == (1, 2)


def test_replicas_share_one_ledger() -> None:
    """Two tenants with many requests, behind one queue for three replicas: each has half of what has been started."""
    sizes = limits(num_blocks=200, max_seqs=4, max_tokens=64)
    ledger = Ledger()
    fleet = Fleet(3, sizes, ledger=ledger)
    workers = [PretendWorker(max_slots=4, num_blocks=200, page_size=4, vocab_size=VOCAB, audit=True) for _ in range(3)]
    ones: dict[str, list[Sequence]] = {"a": [], "b": []}
    for tenant, own in ones.items():
        for index in range(150):
            prompt = Prompt((np.arange(12, dtype=np.int32) * (index + 2) + index) % VOCAB)
            own.append(Sequence(prompt, limit=5, seed=index, tenant=tenant))
            fleet.submit(own[-1])
    for _ in range(60):
        fleet.dispatch()
        for replica, worker in enumerate(workers):
            while (plan := fleet.plan(replica)) is not None:
                fleet.check()
                fleet.apply(replica, worker.run(plan))
                break
    a, b = (sum(one.starts for one in own) for own in ones.values())
    assert a + b > 90
    assert abs(a - b) < 12 + 3 * 8
