"""Joining, talking, and noticing that the engine is gone: over real sockets."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from tests.workers.engine import Engine
from toka.wire import VERSION, Agreed, Attached, Beat, Hello, Loading, Plan, Refused, Stop, Tokens, Welcome, encode
from workers import link as module
from workers.config import OptionError
from workers.link import BadMessage, EngineLost, Link, Refusal, Stopped, join

HELLO = Hello(version=VERSION, pid=42)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def link(context: zmq.Context[zmq.Socket[bytes]], engine: Engine) -> Iterator[Link]:
    with Link(context, engine.welcome(), die=no_death) as link:
        assert isinstance(engine.hear(), Attached)
        yield link


def no_death(code: int) -> None:
    pytest.fail(f"the process would have ended with code {code}")


def joining(aside: ThreadPoolExecutor, context: zmq.Context[zmq.Socket[bytes]], address: str) -> Future[Welcome]:
    return aside.submit(join, context, address, HELLO)


def test_a_welcome_answers_hello(
    context: zmq.Context[zmq.Socket[bytes]], engine: Engine, aside: ThreadPoolExecutor
) -> None:
    """The worker says who it is and gets the engine's Welcome as it was sent."""
    joined = joining(aside, context, engine.address)
    peer, hello = engine.greet()
    engine.answer(peer, engine.welcome(rank=3))
    assert hello == HELLO
    assert joined.result(10) == engine.welcome(rank=3)


def test_a_refusal_gives_the_reason(
    context: zmq.Context[zmq.Socket[bytes]], engine: Engine, aside: ThreadPoolExecutor
) -> None:
    """A duplicate rank, say, learns why it may not join, and no endpoint."""
    joined = joining(aside, context, engine.address)
    engine.answer(engine.greet()[0], Refused(reason="rank 0 is taken"))
    with pytest.raises(Refusal, match="rank 0 is taken"):
        joined.result(10)


def test_any_other_answer_is_an_error(
    context: zmq.Context[zmq.Socket[bytes]], engine: Engine, aside: ThreadPoolExecutor
) -> None:
    """What is neither Welcome nor Refused comes from no control address."""
    joined = joining(aside, context, engine.address)
    engine.answer(engine.greet()[0], Stop())
    with pytest.raises(BadMessage, match="control address"):
        joined.result(10)


def test_a_worker_may_come_first(
    context: zmq.Context[zmq.Socket[bytes]],
    aside: ThreadPoolExecutor,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for an engine that is not there yet, says so once, and says Hello once the engine comes."""
    monkeypatch.setattr(module, "PATIENCE", 50)
    caplog.set_level("INFO")
    joined = joining(aside, context, f"ipc://{tmp_path}/control")
    time.sleep(0.3)
    with Engine(str(tmp_path)) as engine:
        engine.answer(engine.greet()[0], engine.welcome())
        assert joined.result(10).epoch == 7
    assert [record.message for record in caplog.records] == [f"waiting for the engine at ipc://{tmp_path}/control"]


def test_hello_is_said_again_to_an_engine_that_came_back(
    context: zmq.Context[zmq.Socket[bytes]], aside: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """An engine that dies before it answers is as good as none: the next one hears one Hello, not two."""
    joined = joining(aside, context, f"ipc://{tmp_path}/control")
    with Engine(str(tmp_path)) as first:
        first.greet()
    with Engine(str(tmp_path)) as second:
        peer, _ = second.greet()
        assert not second.control.poll(100)
        second.answer(peer, second.welcome())
        assert joined.result(10).epoch == 7


def test_an_address_that_is_none_is_a_wrong_option(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """ZeroMQ's complaint becomes one line that names the option."""
    with pytest.raises(OptionError, match="engine=tcp://no host:1 is no address"):
        join(context, "tcp://no host:1", HELLO)


def test_waiting_ends_with_the_parent(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    """Whoever started the worker is gone: nobody needs it, so it does not wait for ever."""
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(EngineLost, match="whoever started"):
        join(context, f"ipc://{tmp_path}/nobody", HELLO, reader)
    os.close(reader)


def test_plans_arrive_as_soon_as_attached_is_said(link: Link, engine: Engine) -> None:
    """Attached promises that the plan socket is connected: a send that does not block reaches the worker."""
    engine.say(Agreed(epoch=7, num_blocks=5))
    assert link.agreed() == Agreed(epoch=7, num_blocks=5)


def test_it_works_over_ipc(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    """A local worker talks through files."""
    with Engine(str(tmp_path)) as engine, Link(context, engine.welcome(), die=no_death) as link:
        assert isinstance(engine.hear(), Attached)
        engine.say(Plan(epoch=7, step=0))
        assert link.receive(wait=True) == Plan(epoch=7, step=0)


def test_no_plan_socket_no_link(context: zmq.Context[zmq.Socket[bytes]], engine: Engine, tmp_path: Path) -> None:
    """A Welcome whose plan endpoint nobody serves is a lost engine, at once."""
    with pytest.raises(EngineLost, match="does not answer"):
        Link(context, engine.welcome(plans=f"ipc://{tmp_path}/nobody"), die=no_death)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT", 0.02)


def test_beats_come_while_the_main_thread_is_busy(quick: None, link: Link, engine: Engine) -> None:
    """Liveness has a thread of its own, and tells the last step done."""
    assert engine.hear(beats=True) == Beat(epoch=7, rank=0, step=-1)
    link.say(Tokens(epoch=7, step=0, ids=b""))
    heard = [engine.hear(beats=True) for _ in range(5)]
    time.sleep(0.1)
    while engine.results.poll(0):
        heard.append(engine.hear(beats=True))
    assert heard[-1] == Beat(epoch=7, rank=0, step=0)
    assert len(heard) > 5


def test_progress_is_told_ten_times_a_second(link: Link, engine: Engine) -> None:
    """However often the loader reports, the engine hears the first word, the last, and few between."""
    for done in range(1001):
        link.progress("weights", done, 1000)
    link.say(Tokens(epoch=7, step=0, ids=b""))
    heard = [engine.hear()]
    while not isinstance(heard[-1], Tokens):
        heard.append(engine.hear())
    assert heard[0] == Loading(epoch=7, rank=0, phase="weights", done=0, total=1000)
    assert heard[-2] == Loading(epoch=7, rank=0, phase="weights", done=1000, total=1000)
    assert len(heard) < 10


def test_a_long_start_ends_with_stop(link: Link, engine: Engine) -> None:
    """The loader's reports are where Stop is seen, so nobody waits for a load that is not wanted any more."""
    engine.say(Stop(reason="enough"))
    with pytest.raises(Stopped, match="enough"):
        until(lambda: link.progress("weights", 1, 1))


def until(act: Callable[[], None]) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        act()
        time.sleep(0.005)


def test_receive_does_not_wait_unless_asked(link: Link) -> None:
    """With nothing there it answers None."""
    assert link.receive(wait=False) is None


def test_another_epoch_is_dropped_and_counted(link: Link, engine: Engine) -> None:
    """What was meant for a worker before this one changes nothing."""
    engine.say(Plan(epoch=6, step=5))
    engine.say(Plan(epoch=7, step=0))
    assert link.receive(wait=True) == Plan(epoch=7, step=0)
    assert link.dropped == 1


def test_a_gap_in_the_steps_is_an_error(link: Link, engine: Engine) -> None:
    """Plans are deltas: without one of them the next means nothing."""
    engine.say(Plan(epoch=7, step=0))
    engine.say(Plan(epoch=7, step=2))
    link.receive(wait=True)
    with pytest.raises(BadMessage, match="step 2 where step 1 was due"):
        link.receive(wait=True)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91\xa5plans", encode(Tokens(epoch=7, step=0, ids=b""))])
def test_what_cannot_be_decoded_is_an_error(link: Link, engine: Engine, data: bytes) -> None:
    """An unknown tag, or no message at all, inside the live epoch."""
    engine.plans.send(data)
    with pytest.raises(BadMessage, match="no message of this protocol"):
        link.receive(wait=True)


def test_a_plan_before_agreed_is_an_error(link: Link, engine: Engine) -> None:
    """Nothing may be planned before the number of blocks is agreed."""
    engine.say(Plan(epoch=7, step=0))
    with pytest.raises(BadMessage, match="Plan before the worker was ready"):
        link.agreed()


def test_agreed_twice_is_an_error(link: Link, engine: Engine) -> None:
    """Only plans and Stop follow."""
    engine.say(Agreed(epoch=7, num_blocks=1))
    with pytest.raises(BadMessage, match="Agreed where a plan was due"):
        link.receive(wait=True)


def test_a_crash_of_the_engine_wakes_the_worker(
    context: zmq.Context[zmq.Socket[bytes]], aside: ThreadPoolExecutor
) -> None:
    """A worker that waits for a plan learns at once that there will be none."""
    with Engine() as engine, Link(context, engine.welcome(), die=no_death) as link:
        waiting = aside.submit(link.receive, wait=True)
        engine.crash()
        with pytest.raises(EngineLost, match="the engine is gone"):
            waiting.result(1)


def test_what_came_before_a_crash_is_read_first(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """An engine that says Stop and leaves at once has stopped its worker, not lost it."""
    with Engine() as engine, Link(context, engine.welcome(), die=no_death) as link:
        engine.hear()
        engine.say(Plan(epoch=7, step=0))
        engine.say(Stop())
        engine.crash()
        time.sleep(0.1)
        assert link.receive(wait=False) == Plan(epoch=7, step=0)
        assert link.receive(wait=False) == Stop()
        with pytest.raises(EngineLost):
            link.receive(wait=True)


def test_the_end_of_stdin_is_the_end_of_the_parent(context: zmq.Context[zmq.Socket[bytes]], engine: Engine) -> None:
    """A launcher that was killed closes the pipe, whatever else still answers."""
    reader, writer = os.pipe()
    with Link(context, engine.welcome(), stdin=reader, die=no_death) as link:
        os.close(writer)
        with pytest.raises(EngineLost, match="whoever started"):
            link.receive(wait=True)
    os.close(reader)


@pytest.mark.parametrize(("stopped", "code"), [(False, 1), (True, 0)])
def test_a_busy_main_thread_is_not_waited_for(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch, stopped: bool, code: int
) -> None:
    """In the midst of a load or a step nobody reads the socket: the process ends, with code 0 if Stop was heard."""
    monkeypatch.setattr(module, "GRACE", 0.05)
    codes: list[int] = []
    died = threading.Event()

    def die(code: int) -> None:
        codes.append(code)
        died.set()

    with Engine() as engine, Link(context, engine.welcome(), die=die) as link:
        if stopped:
            engine.say(Stop())
            link.receive(wait=True)
        engine.crash()
        assert died.wait(10)
    assert codes == [code]


def test_last_words_still_leave(context: zmq.Context[zmq.Socket[bytes]], engine: Engine) -> None:
    """What is said right before the link closes arrives."""
    with Link(context, engine.welcome(), die=no_death) as link:
        engine.hear()
        link.say(Tokens(epoch=7, step=0, ids=bytes(100_000)))
    assert engine.hear() == Tokens(epoch=7, step=0, ids=bytes(100_000))


def test_what_a_lost_engine_cannot_hear_holds_nobody_up(link: Link, engine: Engine) -> None:
    """Results are dropped at once, what the engine had sent is still read, and then it is known to be lost."""
    engine.plans.send(encode(Plan(epoch=7, step=0)))
    engine.plans.send(encode(Stop(reason="enough")))
    assert isinstance(link.receive(wait=True), Plan)
    engine.crash()
    began = time.monotonic()
    link.say(Tokens(epoch=7, step=0, ids=b""))
    link.say(Tokens(epoch=7, step=1, ids=b""))
    assert link.receive(wait=True) == Stop(reason="enough")
    with pytest.raises(EngineLost):
        link.receive(wait=True)
    assert time.monotonic() - began < 5
