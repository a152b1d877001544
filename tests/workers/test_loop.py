"""When plans are taken and results leave, on a device that is done at once and on one that takes its time."""

from collections import deque
from dataclasses import dataclass, field

import pytest

from tests.workers.arithmetic import admit, build, greedy
from toka.wire import Plan, Stop, Tokens, pack, unpack
from workers.loop import Loop
from workers.outbox import HostOutbox, Outbox, Pending, Sampled
from workers.scores import Outcome
from workers.slots import BadPlan

PROMPT = [3, 1, 4]
FIRST = Plan(epoch=7, step=0, admits=[admit(0, PROMPT, [2, 0, 1])], chunks=pack([0, 0, 3]))
SECOND = Plan(epoch=7, step=1, decode=pack([0]))


def later(step: int) -> Plan:
    return Plan(epoch=7, step=step)


@dataclass
class Script:
    """A wire whose messages come when the script says: None is a look that finds nothing. Notes what happens."""

    messages: deque[Plan | Stop | None]
    events: list[str] = field(default_factory=list)
    said: list[Tokens] = field(default_factory=list)
    epoch: int = 7

    def receive(self, wait: bool) -> Plan | Stop | None:
        message = self.messages.popleft()
        while message is None and wait:
            message = self.messages.popleft()
        self.events.append(f"got {message.step}" if isinstance(message, Plan) else "stop" if message else "nothing")
        return message

    def say(self, tokens: Tokens) -> None:
        self.events.append(f"sent {tokens.step}")
        self.said.append(tokens)


@dataclass
class Slow:
    """An outbox whose steps are done after so many looks at them."""

    looks: int
    events: list[str]

    def begin(self) -> None:
        pass

    def send(self, step: int, outcome: Outcome) -> Pending:
        self.events.append(f"launched {step}")
        return Flight(step, pack(outcome.ids.tolist()), self)


@dataclass
class Flight:
    step: int
    ids: bytes
    outbox: Slow
    looks: int = 0

    def done(self) -> bool:
        self.looks += 1
        return self.looks > self.outbox.looks

    def result(self) -> Sampled:
        return Sampled(self.step, self.ids, 0.5, 0.25)


def run(messages: list[Plan | Stop | None], looks: int | None = None) -> Script:
    """Play the script; with a slow device if `looks` says how slow."""
    script = Script(deque(messages))
    outbox: Outbox = HostOutbox() if looks is None else Slow(looks, script.events)
    slots, step = build()
    Loop(script, slots, step, outbox).run()
    return script


def test_a_result_leaves_before_the_next_plan_is_asked_for() -> None:
    """On a CPU a step is done when it returns, and its tokens wait for nothing."""
    script = run([FIRST, SECOND, later(2), Stop()])
    assert script.events == ["got 0", "sent 0", "got 1", "sent 1", "got 2", "sent 2", "stop"]
    assert [unpack(tokens.ids) for tokens in script.said] == [[token] for token in greedy(PROMPT, 3)]
    assert all(tokens.epoch == 7 and tokens.busy > 0 for tokens in script.said)
    assert script.said[0].gap == 0 < script.said[1].gap


def test_the_next_step_is_launched_before_the_last_result_is_waited_for() -> None:
    """While the device runs one step the host prepares another: it never has more than two under way."""
    script = run([FIRST, SECOND, later(2), Stop()], looks=1000)
    assert script.events == [
        *("got 0", "launched 0", "got 1", "launched 1", "sent 0", "got 2", "launched 2", "sent 1", "stop", "sent 2")
    ]
    assert [unpack(tokens.ids) for tokens in script.said] == [[token] for token in greedy(PROMPT, 3)]


def test_a_result_leaves_though_no_plan_comes() -> None:
    """The device is done while the host looks for plans: the result leaves at once."""
    script = run([FIRST, None, None, SECOND, None, Stop()], looks=2)
    assert script.events[:5] == ["got 0", "launched 0", "nothing", "nothing", "sent 0"]
    assert script.events[5:] == ["got 1", "launched 1", "nothing", "stop", "sent 1"]


def test_a_plan_that_comes_while_a_step_runs_is_launched_at_once() -> None:
    """The device would stand idle if it waited for the step to end."""
    script = run([FIRST, None, SECOND, Stop()], looks=5)
    assert script.events[:5] == ["got 0", "launched 0", "nothing", "got 1", "launched 1"]


def test_stop_lets_everything_finish() -> None:
    """What was sent before Stop is answered."""
    script = run([FIRST, SECOND, Stop()], looks=1000)
    assert [tokens.step for tokens in script.said] == [0, 1]


def test_times_are_passed_on() -> None:
    """The engine's cost model lives on them."""
    script = run([FIRST, Stop()], looks=0)
    assert (script.said[0].busy, script.said[0].gap) == (0.5, 0.25)


def test_a_plan_that_makes_no_sense_ends_the_loop() -> None:
    """Nothing after it would mean anything."""
    with pytest.raises(BadPlan):
        run([Plan(epoch=7, step=0, releases=pack([0])), Stop()])
