"""How long will those who wait take to start? What the scheduler says, against what then happens."""

import numpy as np
import pytest

from toka.core.drain import LOOK
from toka.core.limits import Limits
from toka.core.prompt import Prompt
from toka.core.scheduler import Scheduler
from toka.core.sequence import BATCH, End, Sequence
from toka.sim.cost import Costs
from toka.sim.device import NO_END, STOP_ID, Device
from toka.sim.workload import SHAREGPT, Asked, Lognormal, Shape, Workload, synthetic
from toka.wire import Tokens

COSTS = Costs(step=2e-3, row=2e-6, kv_token=1e-9, prefill_token=2e-6, prefill_pair=0.0)
PREFILLS = Shape(own=Lognormal(1500, 0.3, 64, 4096), output=Lognormal(4, 0, 1, 4))
"""Long prompts with next to no answers."""
SAMPLES = Shape(own=Lognormal(500, 0.5, 16, 2048), output=Lognormal(100, 0.5, 4, 1024), samples=16)
LIMITS = Limits(num_blocks=2000, page_size=16, max_seqs=64, max_tokens=2048, max_ahead=4, max_len=8192)


class Clock:
    """A scheduler, a pretend device, and the time that has passed on it."""

    def __init__(self, workload: Workload, limits: Limits = LIMITS) -> None:
        most = np.repeat(workload.limit, workload.samples)
        ends = np.append(np.where(workload.output < most, workload.output, NO_END), NO_END).astype(np.int64)
        self.scheduler = Scheduler(limits)
        self.device = Device(limits.max_seqs, limits.page_size, ends, np.zeros(len(ends), dtype=np.int64))
        self.now = 0.0
        self.ended = 0
        self.last = len(ends) - 1
        for request in range(workload.requests):
            prompt, limit = Prompt(workload.prompt(request)), int(workload.limit[request])
            for number in range(request * workload.samples, (request + 1) * workload.samples):
                self.scheduler.submit(Sequence(prompt, limit=limit, stops=(STOP_ID,), seed=number))

    def step(self) -> None:
        plan = self.scheduler.plan()
        assert plan is not None
        sampled = self.device.run(plan)
        seconds = COSTS.seconds(sampled.work)
        self.now += seconds
        progress = self.scheduler.apply(Tokens(epoch=0, step=plan.step, ids=sampled.ids, busy=seconds))
        self.ended += len(progress.ended)

    def newcomer(self, prompt: int = 100, limit: int = 100) -> tuple[float, float]:
        """One more request: in how many seconds it was said to start, and in how many it did."""
        said = self.scheduler.until_start(prompt, limit)
        last = Sequence(Prompt(np.full(prompt, -7, dtype=np.int32)), limit=limit, stops=(STOP_ID,), seed=self.last)
        self.scheduler.submit(last)
        began = self.now
        while last.seat < 0:
            self.step()
        return said, self.now - began


def after(shape: Shape, ended: int, requests: int = 400) -> Clock:
    """So many requests at once, a few steps or some ends later."""
    clock = Clock(synthetic(shape, Asked(), requests, seed=1))
    for _ in range(20):
        clock.step()
    while clock.ended < ended:
        clock.step()
    return clock


SHAPES = {"chats": (SHAREGPT, 400), "prompts": (PREFILLS, 400), "samples": (SAMPLES, 30)}


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_said_comes_true(name: str) -> None:
    """Once the predictor has seen lengths, a newcomer starts about when it was said, whether slots, blocks or prefill
    hold it up."""
    clock = after(SHAPES[name][0], 200, SHAPES[name][1])
    said, took = clock.newcomer()
    assert took > 0.3
    assert 0.7 * took < said < 2 * took


@pytest.mark.parametrize("name", SHAPES)
def test_before_lengths_are_known_nothing_is_said_too_soon(name: str) -> None:
    """Then everybody is taken to use all of max_tokens: who comes back when told to does not come in vain."""
    clock = after(SHAPES[name][0], 0, SHAPES[name][1])
    said, took = clock.newcomer()
    assert said > 0.9 * took


def test_a_queue_longer_than_the_look_goes_on_at_the_same_rate() -> None:
    """Four times as many who wait take about four times as long."""
    short, long = (after(PREFILLS, 200, requests).scheduler for requests in (LOOK + 200, 4 * LOOK + 200))
    assert long.waiting > 3 * LOOK
    ratio = (long.until_start(100, 100) / short.until_start(100, 100)) / (long.waiting / short.waiting)
    assert 0.7 < ratio < 1.4


def test_who_finds_room_starts_at_once() -> None:
    """An empty scheduler, before and after it has measured a step, and one with room beside those who run."""
    assert Scheduler(LIMITS).until_start(100, 100) == 0
    clock = after(SHAREGPT, 0, 10)
    assert clock.scheduler.running == 10
    assert clock.scheduler.until_start(100, 100) == 0


def test_to_ask_changes_nothing() -> None:
    """Two runs of the same work, one of them asked at every step, do the same."""
    quiet, asked = (Clock(synthetic(SHAREGPT, Asked(), 80, seed=2)) for _ in range(2))
    while quiet.ended < 80:
        asked.scheduler.until_start(10, 10)
        quiet.step()
        asked.step()
        assert (asked.now, asked.scheduler.running) == (quiet.now, quiet.scheduler.running)


def test_the_queue_counts_requests_and_prompt_tokens() -> None:
    """For each tenant: a request once, by its first choice; a prompt once a choice; nothing of the batch lane; and what
    has gone does not stay counted."""
    scheduler = Scheduler(LIMITS._replace(max_seqs=1))
    queue = scheduler.queue
    prompt = Prompt(np.arange(10, dtype=np.int32))
    mine = [Sequence(prompt, limit=5, choice=choice, tenant="a") for choice in range(3)]
    batch = Sequence(prompt, limit=5, priority=BATCH, tenant="a")
    for sequence in (*mine, batch):
        scheduler.submit(sequence)
    assert (queue.held("a").requests, queue.held("a").tokens, scheduler.waiting) == (1, 30, 4)
    scheduler.plan()
    assert (queue.held("a").requests, queue.held("a").tokens) == (0, 20)
    for sequence in (*mine, batch):
        scheduler.finish(sequence, End.CANCELLED)
    assert (queue.held("a").requests, queue.held("a").tokens, scheduler.waiting) == (0, 0, 0)


def test_a_tenant_waits_for_its_own() -> None:
    """Who shares the slots with one that has a hundred in the queue, and has one there, starts long before the next of
    the hundred."""
    scheduler = Scheduler(LIMITS._replace(max_seqs=4))
    for number in range(101):
        prompt = Prompt(np.full(20, number, dtype=np.int32))
        scheduler.submit(Sequence(prompt, limit=50, tenant="many" if number else "few"))
    scheduler.depth.observe(0.01)
    few, many, new = (scheduler.until_start(20, 50, tenant) for tenant in ("few", "many", "new"))
    assert new <= few < many / 10
    assert 0.5 < many / (100 / 4 * 50 * 0.01) < 1.5
