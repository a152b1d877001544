"""The scheduler: what it promises to each sequence, and that its books balance after every step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.core.replica import BOLD, Replica, expected, limits
from toka.core.admission import Policy
from toka.core.hydragen import Groups
from toka.core.progress import Diverged
from toka.core.prompt import Prompt
from toka.core.sequence import BATCH, End, Sequence
from toka.wire import Tokens


def test_a_sequence_gets_its_tokens() -> None:
    """One sequence alone generates `limit` tokens and ends by length."""
    replica = Replica(limits())
    sequence = replica.sequence(5, 9)
    replica.run()
    assert replica.seen[sequence] == expected(sequence)
    assert replica.ends[sequence] is End.LENGTH


def test_a_stop_id_ends_a_sequence_and_belongs_to_it() -> None:
    """The stop id is the last token reported; steps that ran ahead of it are dropped."""
    replica = Replica(limits())
    probe = replica.sequence(5, 30)
    tokens = expected(probe)
    probe.stops = (tokens[4],)
    replica.run()
    assert replica.seen[probe] == tokens[: tokens.index(tokens[4]) + 1]
    assert replica.ends[probe] is End.STOP


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    """No step is larger than max_tokens, and the answer does not depend on the chunks."""
    replica = Replica(limits(max_tokens=8))
    sequence = replica.sequence(50, 3)
    replica.run()
    assert replica.worker.largest_step == 8
    assert replica.seen[sequence] == expected(sequence)


def test_decoding_goes_on_beside_a_prefill() -> None:
    """A chunk takes what the decodes leave of the step, so a long prompt does not hold up running sequences."""
    replica = Replica(limits(max_tokens=8))
    running = replica.sequence(4, 30, watched=True)
    replica.plan()
    replica.land()
    replica.sequence(60, 1)
    for _ in range(5):
        replica.plan()
        replica.land()
    assert len(replica.seen[running]) == 6


def test_first_come_first_served() -> None:
    """Sequences start in the order in which they came."""
    replica = Replica(limits(max_seqs=1))
    order = [replica.sequence(3, 2) for _ in range(5)]
    replica.run()
    assert list(replica.ends) == order


def test_plans_run_ahead_of_results() -> None:
    """Several decode steps are planned before the first token is known, up to the depth."""
    replica = Replica(limits(max_ahead=4))
    replica.sequence(3, 20)
    planned = 0
    while replica.plan():
        planned += 1
    assert planned == 2, "before any step was timed"
    replica.land()
    while replica.plan():
        planned += 1
    assert replica.scheduler.in_flight == 4, "steps of 1 ms"


def test_slots_and_blocks_are_given_on_before_the_last_results_are_in() -> None:
    """A length end is known when it is planned: the next sequence starts in the very next plan."""
    replica = Replica(limits(max_seqs=1, num_blocks=2))
    first = replica.sequence(4, 1)
    second = replica.sequence(4, 1)
    assert replica.plan()
    assert replica.plan()
    assert replica.scheduler.in_flight == 2
    replica.run()
    assert replica.seen[first] == expected(first)
    assert replica.seen[second] == expected(second)


def test_preemption_keeps_tokens() -> None:
    """When blocks run out the newest sequence goes back to the queue with its tokens, and ends with the same answer."""
    replica = Replica(limits(num_blocks=60, max_seqs=4), BOLD)
    # Each needs 26 blocks in the end, and starts with one.
    sequences = [replica.sequence(3, 100) for _ in range(3)]
    replica.run()
    assert replica.scheduler.preemptions > 0
    for sequence in sequences:
        assert replica.seen[sequence] == expected(sequence)


def test_preemption_waits_for_what_is_in_flight() -> None:
    """Nobody is preempted on stale news: the scheduler first plans nothing until all results are in."""
    replica = Replica(limits(num_blocks=40, max_seqs=2), BOLD)
    replica.sequence(4, 100)
    replica.sequence(4, 100)
    while not replica.scheduler.preemptions:
        in_flight = replica.scheduler.in_flight
        if replica.plan():
            assert replica.scheduler.preemptions == 0 or in_flight == 0
        elif not replica.scheduler.preemptions:
            assert replica.land()


def test_preempted_work_goes_first() -> None:
    """A preempted sequence is at the queue's head: nobody who came later starts before it."""
    replica = Replica(limits(num_blocks=40, max_seqs=2), BOLD)
    first, second = replica.sequence(3, 100), replica.sequence(3, 100)
    later = replica.sequence(3, 100)
    replica.run()
    assert replica.scheduler.preemptions > 0
    assert list(replica.ends) == [first, second, later]


def test_one_token_under_memory_pressure() -> None:
    """max_tokens=1 beside sequences that fill the cache gets its answer."""
    replica = Replica(limits(num_blocks=6, max_seqs=4))
    sequences = [replica.sequence(7, limit) for limit in (16, 1, 16, 1, 1)]
    replica.run()
    for sequence in sequences:
        assert replica.seen[sequence] == expected(sequence)


def test_a_sequence_as_large_as_the_cache_runs() -> None:
    """The last token sampled is never run, so it needs no place."""
    replica = Replica(limits(num_blocks=4, page_size=4))
    sequence = replica.sequence(10, 7)
    assert replica.scheduler.fits(sequence)
    replica.run()
    assert replica.seen[sequence] == expected(sequence)


def test_a_sequence_larger_than_the_cache_does_not_fit() -> None:
    """It is refused at the door rather than left waiting for ever."""
    replica = Replica(limits(num_blocks=4, page_size=4))
    assert not replica.scheduler.fits(Sequence(Prompt(np.arange(10, dtype=np.int32)), limit=8))


def test_a_watched_sequence_reports_each_token() -> None:
    """Watched sequences are reported token by token, the others once."""
    replica = Replica(limits())
    watched = replica.sequence(3, 6, watched=True)
    replica.plan()
    replica.land()
    assert replica.seen[watched] == expected(watched)[:1]
    replica.run()
    assert replica.seen[watched] == expected(watched)


def test_tokens_beyond_a_seats_row_are_kept() -> None:
    """A sequence longer than a row of tokens loses none."""
    replica = Replica(limits(num_blocks=600))
    sequence = replica.sequence(5, 1500)
    replica.run()
    assert replica.seen[sequence] == expected(sequence)


@pytest.mark.parametrize("planned", [0, 1, 3])
def test_cancelling_gives_everything_back(planned: int) -> None:
    """Waiting, prefilling or decoding: a cancelled sequence leaves nothing behind and is never reported."""
    replica = Replica(limits(max_tokens=8))
    gone = replica.sequence(20, 20)
    stays = replica.sequence(5, 10)
    for _ in range(planned):
        replica.plan()
    replica.scheduler.finish(gone, End.CANCELLED)
    replica.scheduler.check()
    replica.run()
    assert gone not in replica.ends
    assert replica.seen[stays] == expected(stays)


def test_finishing_twice_is_harmless() -> None:
    """A second end, or an end after the end, changes nothing."""
    replica = Replica(limits())
    sequence = replica.sequence(3, 2)
    replica.run()
    replica.scheduler.finish(sequence, End.CANCELLED)
    assert sequence.end is End.LENGTH


def test_nothing_to_do_is_no_plan() -> None:
    """An idle scheduler plans nothing, rather than an empty step."""
    assert Replica(limits()).scheduler.plan() is None


def test_a_steady_step_costs_a_few_bytes() -> None:
    """The same sequences as before are not named again."""
    replica = Replica(limits(page_size=16))
    for _ in range(8):
        replica.sequence(2, 40)
    replica.plan()
    replica.plan()
    replica.land()
    plan = replica.scheduler.plan()
    assert plan is not None
    assert plan.decode is None
    assert plan.appends == plan.chunks == plan.releases == b""


@pytest.mark.parametrize(
    "tokens",
    [
        Tokens(epoch=7, step=1, ids=b"\0\0\0\0"),
        Tokens(epoch=7, step=0, ids=b""),
        Tokens(epoch=7, step=0, ids=b"\xff\xff\xff\xff"),
    ],
    ids=["another step", "too few rows", "no token for a live sequence"],
)
def test_results_that_do_not_fit_are_refused(tokens: Tokens) -> None:
    """Nothing after a divergence can be trusted."""
    replica = Replica(limits())
    replica.sequence(3, 5)
    assert replica.plan()
    with pytest.raises(Diverged):
        replica.scheduler.apply(tokens)


@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 33), st.booleans()), min_size=1, max_size=25),
    num_blocks=st.integers(18, 120),
    max_seqs=st.integers(1, 10),
    max_tokens=st.integers(10, 40),
    max_ahead=st.integers(1, 6),
    policy=st.sampled_from([BOLD, Policy(), Policy(learn=False)]),
)
@settings(max_examples=60, deadline=None)
def test_random_traffic_always_ends(
    requests: list[tuple[int, int, bool]],
    num_blocks: int,
    max_seqs: int,
    max_tokens: int,
    max_ahead: int,
    policy: Policy,
) -> None:
    """Tiny caches and oversubscription: every sequence is answered once, with the tokens it would get alone."""
    replica = Replica(limits(num_blocks, 4, min(max_seqs, max_tokens), max_tokens, max_ahead), policy, Groups(1, 3))
    sequences = [replica.sequence(prompt, limit, stops=(3, 17) if stops else ()) for prompt, limit, stops in requests]
    replica.run()
    for sequence in sequences:
        assert replica.seen[sequence] == expected(sequence)


class Traffic(RuleBasedStateMachine):
    """Submitting, planning, landing and cancelling in any order."""

    policy = Policy()

    def __init__(self) -> None:
        super().__init__()
        self.replica = Replica(limits(num_blocks=40, max_seqs=5, max_tokens=12, max_ahead=5), self.policy, Groups(2, 2))
        self.cancelled: set[Sequence] = set()

    @rule(
        prompt=st.integers(1, 40),
        limit=st.integers(1, 110),
        stop=st.booleans(),
        watched=st.booleans(),
        family=st.none() | st.integers(0, 2),
        priority=st.sampled_from([0, 0, 3, BATCH]),
        tenant=st.sampled_from(["", "one", "two"]),
    )
    def submit(
        self, prompt: int, limit: int, stop: bool, watched: bool, family: int | None, priority: int, tenant: str
    ) -> None:
        stops = (5, 11) if stop else ()
        self.replica.sequence(
            prompt, limit, stops=stops, watched=watched, family=family, priority=priority, tenant=tenant
        )

    @precondition(lambda self: self.replica.seen)
    @rule(data=st.data(), limit=st.integers(1, 30))
    def sample_again(self, data: st.DataObject, limit: int) -> None:
        again = data.draw(st.sampled_from(list(self.replica.seen)))
        if len(again.prompt) + limit <= 160:
            self.replica.sequence(0, limit, prompt=again.prompt)

    @rule()
    def plan(self) -> None:
        self.replica.plan()

    @rule()
    def land(self) -> None:
        self.replica.land()

    @rule()
    def the_worker_is_lost(self) -> None:
        lost = self.replica
        self.replica = Replica(limits(num_blocks=40, max_seqs=5, max_tokens=12, max_ahead=5), self.policy, Groups(2, 2))
        self.replica.seen, self.replica.ends, self.replica._made = lost.seen, lost.ends, lost._made
        for sequence in lost.scheduler.abandon():
            self.replica.seen[sequence] = self.replica.seen[sequence][: sequence.kept]
            self.replica.scheduler.submit(sequence)

    @rule(busy=st.sampled_from([0.0001, 0.002, 0.05]))
    def change_of_pace(self, busy: float) -> None:
        self.replica.busy = busy

    @precondition(lambda self: self.replica.seen)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        open_ones = [s for s in self.replica.seen if s not in self.replica.ends and s not in self.cancelled]
        if open_ones:
            sequence = data.draw(st.sampled_from(open_ones))
            self.replica.scheduler.finish(sequence, End.CANCELLED)
            self.cancelled.add(sequence)

    @invariant()
    def books_balance(self) -> None:
        self.replica.scheduler.check()

    def teardown(self) -> None:
        self.replica.run()
        for sequence, seen in self.replica.seen.items():
            if sequence in self.cancelled:
                assert sequence not in self.replica.ends
                assert seen == expected(sequence)[: len(seen)]
            else:
                assert seen == expected(sequence)


class BoldTraffic(Traffic):
    """The same under a policy that preempts all the time."""

    policy = BOLD


TestTraffic = Traffic.TestCase
TestBoldTraffic = BoldTraffic.TestCase
TestTraffic.settings = TestBoldTraffic.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)


def test_what_is_certain_is_never_preempted() -> None:
    """When every length is known, the curve is exact: the batch is as large as it can be, and nobody is sent back."""
    replica = Replica(limits(num_blocks=60, max_seqs=20, max_tokens=64))
    sequences = [replica.sequence(3 + index % 7, 40 + 11 * index % 60) for index in range(30)]
    replica.run()
    assert replica.scheduler.preemptions == 0
    for sequence in sequences:
        assert replica.seen[sequence] == expected(sequence)


def test_the_curve_is_what_the_running_sequences_will_use() -> None:
    """Kept up to date over starts, ends, chunks and shared blocks, it equals the blocks that are used later."""
    replica = Replica(limits(num_blocks=400, max_seqs=20, max_tokens=40))
    shared = Prompt(np.arange(23, dtype=np.int32))
    for index in range(6):
        replica.sequence(30 + index, 20 + 5 * index)
        replica.sequence(0, 10 + 7 * index, prompt=shared)
    scheduler = replica.scheduler
    while scheduler.waiting or scheduler._prefill.begun:
        assert replica.plan() or replica.land()

    def in_use_next() -> int:
        """What is in use, and what the next step takes."""
        return scheduler.pool.used + len(scheduler._short(scheduler._decoding))

    scheduler.forecast.advance(scheduler.steps)
    curve = scheduler.forecast.usage.ahead(in_use_next())
    seen = [in_use_next()]
    while scheduler.running:
        while not replica.plan():
            assert replica.land()
        seen.append(in_use_next())
    assert curve[: len(seen)].tolist() == seen
    assert len(seen) > 30


def test_a_large_head_is_passed_by_a_few_and_then_by_nobody() -> None:
    """Small sequences may use the room that the head cannot, but not for ever."""
    replica = Replica(limits(num_blocks=40, max_seqs=4, max_tokens=64))
    replica.sequence(4, 100)
    replica.plan()
    large = replica.sequence(100, 50)
    small = [replica.sequence(3, 4) for _ in range(200)]
    replica.run()
    order = list(replica.ends)
    assert order.index(small[0]) < order.index(large)
    assert order.index(large) < 120


def test_lower_priorities_start_first_and_are_preempted_last() -> None:
    """Whatever the order of arrival."""
    replica = Replica(limits(max_seqs=1))
    late = Sequence(Prompt(np.arange(3, dtype=np.int32)), limit=2, priority=5, seed=1)
    soon = Sequence(Prompt(np.arange(3, dtype=np.int32)), limit=2, priority=-5, seed=2)
    for sequence in (late, soon):
        replica.scheduler.submit(sequence)
        replica.seen[sequence] = []
    replica.run()
    assert list(replica.ends) == [soon, late]


def test_plans_say_who_shares_a_prefix() -> None:
    """Samples of one prompt are a group as soon as they decode, and the group ends with them."""
    groups = Groups(min_blocks=2, min_size=3)
    replica = Replica(limits(num_blocks=200), groups=groups)
    shared = Prompt(np.arange(22, dtype=np.int32))
    for index in range(5):
        replica.sequence(0, 10 + index, prompt=shared)
    replica.plan()
    replica.plan()
    assert [len(replica.worker._prefix(group)) for group in replica.worker.groups] == [5]
    assert len(replica.worker.group) == 5
    replica.run()
    assert not groups.all()


def add(replica: Replica, prompt: int, limit: int, priority: int, seed: int) -> Sequence:
    sequence = Sequence(Prompt(np.arange(prompt, dtype=np.int32)), limit=limit, priority=priority, seed=seed)
    replica.scheduler.submit(sequence)
    replica.seen[sequence] = []
    return sequence


@pytest.mark.parametrize(("num_blocks", "max_seqs"), [(40, 8), (400, 2)], ids=["no blocks", "no slots"])
def test_the_batch_lane_gives_way(num_blocks: int, max_seqs: int) -> None:
    """It takes all that is left, and gives it back as soon as somebody who is waited for finds no room."""
    replica = Replica(limits(num_blocks=num_blocks, max_seqs=max_seqs))
    batch = [add(replica, 8, 120, BATCH, 100 + index) for index in range(3)]
    for _ in range(6):
        replica.plan()
        replica.land()
    online = add(replica, 30, 20, 0, 7)
    replica.run()
    assert next(iter(replica.ends)) is online
    for sequence in [online, *batch]:
        assert replica.seen[sequence] == expected(sequence)


def test_online_requests_do_not_preempt_each_other_for_room() -> None:
    """Who came first runs on; only the batch lane gives way."""
    replica = Replica(limits(num_blocks=40, max_seqs=8))
    first = add(replica, 8, 120, 5, 1)
    replica.plan()
    second = add(replica, 30, 100, 0, 2)
    replica.run()
    assert list(replica.ends) == [first, second]
    assert replica.scheduler.preemptions == 0


def test_a_lost_worker_costs_no_token_that_came_back() -> None:
    """Sequences go on in the next epoch from what was returned, in their order, and end with the same answer."""
    replica = Replica(limits(max_tokens=16, max_seqs=4))
    sequences = [replica.sequence(5 + 3 * index, 20) for index in range(7)]
    for _ in range(9):
        replica.plan()
        if replica.scheduler.in_flight >= 2:
            replica.land()
    assert replica.scheduler.in_flight
    returned = replica.scheduler.seats.returned.sum()
    left = replica.scheduler.abandon()
    assert [sequence.arrival for sequence in left] == sorted(sequence.arrival for sequence in left)
    assert sum(sequence.kept for sequence in left) > 0 < returned
    again = Replica(limits(max_tokens=16, max_seqs=4))
    for sequence in left:
        again.seen[sequence] = []
        again.scheduler.submit(sequence)
    again.run()
    for sequence in sequences:
        assert (again if sequence in left else replica).seen[sequence] == expected(sequence)
