"""What tenants have been served: counters, weights, and what the batch lane is owed."""

import numpy as np
import pytest

from toka.core.ledger import BATCH_SHARE, GENERATED, MOST_OWED, PROMPT, Ledger
from toka.core.prompt import Prompt
from toka.core.queue import Queue
from toka.core.sequence import BATCH, Sequence


class Line:
    """A queue, and sequences for it."""

    def __init__(self, **weights: float) -> None:
        self.ledger = Ledger(weights)
        self.queue = Queue(self.ledger)
        self.made = 0

    def push(self, tenant: str, prompt: int = 10, priority: int = 0) -> Sequence:
        sequence = Sequence(Prompt(np.zeros(prompt, dtype=np.int32)), limit=5, tenant=tenant, priority=priority)
        sequence.arrival = self.made
        self.made += 1
        self.queue.push(sequence)
        self.queue.check()
        return sequence

    def start(self) -> str:
        """The next in the queue starts; whose it is."""
        sequence = next(iter(self.queue))
        self.queue.remove(sequence)
        self.ledger.bill(sequence, len(sequence.prompt))
        self.queue.check()
        return sequence.tenant

    def counter(self, sequence: Sequence) -> float:
        return float(self.ledger.counters[sequence.account])


def test_equal_tenants_take_turns() -> None:
    """Whatever order they came in."""
    line = Line()
    for tenant in "aaaabbbb":
        line.push(tenant)
    assert "".join(line.start() for _ in range(8)) == "abababab"


def test_a_weight_of_two_gets_two_turns() -> None:
    """For each turn of a tenant that weighs one, as any does that nothing is said of."""
    line = Line(a=2)
    for tenant in "aaaaaabbb":
        line.push(tenant)
    assert sorted(line.start() for _ in range(6)) == list("aaaabb")


def test_long_prompts_count_for_more() -> None:
    """Turns are counted in tokens."""
    line = Line()
    for _ in range(8):
        line.push("long", 40)
        line.push("short", 10)
    started = [line.start() for _ in range(10)]
    assert started.count("short") == 8


def test_the_order_of_the_queue_is_the_order_of_starting() -> None:
    """When everybody pays for all of its prompt."""
    line = Line(a=0.5, c=3)
    for index in range(30):
        line.push("abc"[index % 3], 1 + index * 7 % 23)
    order = [sequence.tenant for sequence in line.queue]
    assert len(order) == 30
    assert [line.start() for _ in range(30)] == order


def test_idleness_earns_nothing() -> None:
    """A tenant that comes back is lifted to the lowest counter of those that wait."""
    line = Line()
    for _ in range(20):
        line.push("busy")
    idle = line.push("idle")
    for _ in range(12):
        line.start()
    back = line.push("idle")
    assert line.counter(back) >= 90
    assert idle.account == back.account
    assert [line.start() for _ in range(4)].count("idle") == 1


def test_idleness_earns_nothing_where_nobody_waits() -> None:
    """The tenant that waited last stands for those that run."""
    line = Line()
    line.push("busy", 500)
    line.start()
    assert line.counter(line.push("new")) == 500


def test_a_tenant_that_was_served_more_is_not_lowered() -> None:
    """It waits until the others have caught up."""
    line = Line()
    line.push("greedy", 1000)
    line.start()
    line.ledger.left(line.push("other").account)
    line.ledger.counters[1] = 0
    again = line.push("greedy")
    assert line.counter(again) == 1000
    assert line.start() == "other"


def test_a_prompt_is_billed_once() -> None:
    """What is run again after a preemption costs the tenant nothing."""
    line = Line()
    sequence = line.push("a", 30)
    line.start()
    line.ledger.bill(sequence, 30)
    assert line.counter(sequence) == 30 * PROMPT


def test_generated_tokens_count_by_tenant() -> None:
    """From one array of seats for all tenants."""
    line = Line(b=2)
    for tenant in "abc":
        line.push(tenant)
    line.ledger.counters[:] = 0
    line.ledger.served(np.array([0, 1, 1, 2, 0], dtype=np.int32), np.array([0, 1, 2, 4], dtype=np.int32))
    assert line.ledger.counters.tolist() == [2 * GENERATED, GENERATED, 0]


def test_the_batch_lane_keeps_its_own_accounts() -> None:
    """Background work does not cost a tenant its place in the foreground."""
    line = Line()
    batch = line.push("a", 1000, BATCH)
    line.start()
    online = line.push("a")
    assert batch.account != online.account
    assert line.counter(online) == 0


def test_the_batch_lane_starts_from_its_share() -> None:
    """It is owed a share of what the others are served, and its next sequence goes first as soon as that pays for its
    prompt."""
    line = Line()
    batch = line.push("night", 100, BATCH)
    for _ in range(200):
        line.push("day", 60)
    starts = 0
    while not batch.vested:
        line.start()
        starts += 1
        line.queue.promote()
    assert starts * 60 * BATCH_SHARE == pytest.approx(100, rel=0.05)
    assert next(iter(line.queue)) is batch
    assert line.ledger.owed < 60 * BATCH_SHARE


def test_the_batch_lane_is_owed_nothing_for_what_it_had_anyway() -> None:
    """Idle capacity counts, and what it has beyond its share is forgotten."""
    line = Line()
    line.push("night", 10_000, BATCH)
    line.start()
    line.push("night", 10, BATCH)
    line.push("day", 100)
    line.start()
    assert line.ledger.owed == 100 * BATCH_SHARE


def test_the_batch_lane_saves_nothing_up() -> None:
    """While it had nothing waiting it was owed nothing."""
    line = Line()
    for _ in range(100):
        line.push("day", 1000)
        line.start()
    line.push("night", 10, BATCH)
    assert line.ledger.owed == 0


def test_a_prompt_longer_than_what_can_be_owed_starts_all_the_same() -> None:
    """For the most that the lane is ever owed."""
    line = Line()
    batch = line.push("night", int(2 * MOST_OWED), BATCH)
    line.push("day", int(2 * MOST_OWED / BATCH_SHARE))
    line.start()
    line.queue.promote()
    assert batch.vested
    assert line.ledger.owed == 0
