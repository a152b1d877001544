"""One worker from Hello to its exit code, against an engine played by hand; the model is arithmetic."""

import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from tests.workers.arithmetic import VOCAB, admit, build, greedy
from tests.workers.engine import Engine
from toka.wire import VERSION, Agreed, Failed, Loading, Plan, Ready, Refused, Stop, Tokens, Welcome, pack, unpack
from workers.config import Config, OptionError
from workers.errors import WorkerError
from workers.life import live
from workers.start import Progress, Started


def arithmetic(welcome: Welcome, device: torch.device, progress: Progress) -> Started:
    """Load nothing, and say so."""
    progress("weights", 0, 1)
    slots, step = build(welcome.max_slots, page_size=welcome.page_size)
    return Started(slots, step, num_blocks=16, max_model_len=100, vocab_size=VOCAB)


Begin = Callable[[Welcome, torch.device, Progress], Started]


@pytest.fixture
def alive(engine: Engine, aside: ThreadPoolExecutor) -> Iterator[Callable[[Begin], Future[int]]]:
    """Starts a worker beside the test, which plays its engine. The worker leaves with it."""

    def start(begin: Begin) -> Future[int]:
        return aside.submit(live, Config(engine=engine.address, device="cpu"), begin)

    yield start
    engine.crash()


def readied(engine: Engine) -> None:
    """Let the arithmetic worker in, up to its first plan."""
    engine.admit()
    assert isinstance(engine.hear(), Loading)
    assert isinstance(engine.hear(), Ready)
    engine.say(Agreed(epoch=7, num_blocks=16))


def test_the_whole_life(engine: Engine, alive: Callable[[Begin], Future[int]]) -> None:
    """Hello, Welcome, Attached, Loading, Ready, Agreed, plans and tokens, Stop, exit code 0."""
    code = alive(arithmetic)
    hello = engine.admit()
    assert (hello.version, hello.device, hello.pid) == (VERSION, "cpu", os.getpid())
    assert hello.memory > 2**28
    assert engine.hear() == Loading(epoch=7, rank=0, phase="weights", done=0, total=1)
    ready = engine.hear()
    assert isinstance(ready, Ready)
    assert (ready.num_blocks, ready.max_model_len, ready.vocab_size) == (16, 100, VOCAB)
    engine.say(Agreed(epoch=7, num_blocks=12))
    engine.say(Plan(epoch=7, step=0, admits=[admit(1, [3, 1], [2])], chunks=pack([1, 0, 2])))
    engine.say(Plan(epoch=7, step=1, decode=pack([1])))
    engine.say(Stop())
    out = []
    for step in range(2):
        tokens = engine.hear()
        assert isinstance(tokens, Tokens)
        assert (tokens.epoch, tokens.step) == (7, step)
        out += unpack(tokens.ids)
    assert out == greedy([3, 1], 2)
    assert code.result(10) == 0


def test_a_refused_worker_leaves_with_2(
    engine: Engine, alive: Callable[[Begin], Future[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """It was started wrongly, and its person reads why."""
    code = alive(arithmetic)
    engine.answer(engine.greet()[0], Refused(reason="rank 0 is taken"))
    assert code.result(10) == 2
    assert caplog.messages == ["the engine refused this worker: rank 0 is taken"]


@pytest.mark.parametrize(
    ("error", "words", "traceback"),
    [
        (WorkerError("model.safetensors is truncated: fetch it again"), "is truncated: fetch it again", False),
        (MemoryError(), "out of memory: set kv_cache_num_tokens", False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to\nmore"), "out of memory: set .*Tried to", False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"), "out of memory: set ", False),
        (ValueError("something of our own"), "^ValueError: something of our own$", True),
    ],
)
def test_a_failed_start_reaches_the_engine(
    engine: Engine,
    alive: Callable[[Begin], Future[int]],
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    words: str,
    traceback: bool,
) -> None:
    """The reason is one line, the exit code 1; a traceback is for faults of our own."""

    def fail(welcome: Welcome, device: torch.device, progress: Progress) -> Started:
        raise error

    code = alive(fail)
    engine.admit()
    failed = engine.hear()
    assert isinstance(failed, Failed)
    assert re.search(words, failed.reason)
    assert "\n" not in failed.reason
    assert code.result(10) == 1
    assert [bool(record.exc_info) for record in caplog.records if record.levelname == "ERROR"] == [traceback]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(epoch=7, step=1), "step 1 where step 0 was due"),
        (Plan(epoch=7, step=0, decode=pack([0])), "has not been prefilled"),
        (Plan(epoch=7, step=0, decode=b"abc"), "no rows of 1 int32"),
    ],
)
def test_a_plan_that_makes_no_sense_ends_the_process(
    engine: Engine, alive: Callable[[Begin], Future[int]], plan: Plan, words: str
) -> None:
    """A gap or a contradiction ends the epoch loudly."""
    code = alive(arithmetic)
    readied(engine)
    engine.say(plan)
    failed = engine.hear()
    assert isinstance(failed, Failed)
    assert failed.reason.startswith("the engine sent a plan that cannot be run: ")
    assert words in failed.reason
    assert code.result(10) == 1


def test_bytes_that_are_no_message_end_the_process(engine: Engine, alive: Callable[[Begin], Future[int]]) -> None:
    """An unknown tag comes from another protocol."""
    code = alive(arithmetic)
    readied(engine)
    engine.plans.send(b"\x91\xa4what")
    failed = engine.hear()
    assert isinstance(failed, Failed)
    assert "no message of this protocol" in failed.reason
    assert code.result(10) == 1


def test_more_blocks_than_there_are_cannot_be_agreed(engine: Engine, alive: Callable[[Begin], Future[int]]) -> None:
    """The least over the ranks is at most what this one has."""
    code = alive(arithmetic)
    engine.admit()
    engine.hear()
    engine.hear()
    engine.say(Agreed(epoch=7, num_blocks=17))
    failed = engine.hear()
    assert isinstance(failed, Failed)
    assert "more than the 16 blocks" in failed.reason
    assert code.result(10) == 1


def test_a_crash_of_the_engine_ends_the_worker(alive: Callable[[Begin], Future[int]], engine: Engine) -> None:
    """Without a Stop the exit code is 1, and it does not take long."""
    code = alive(arithmetic)
    readied(engine)
    began = time.monotonic()
    engine.crash()
    assert code.result(10) == 1
    assert time.monotonic() - began < 1.5


def test_stop_ends_a_start_that_takes_long(engine: Engine, alive: Callable[[Begin], Future[int]]) -> None:
    """Nobody waits for a load that is not wanted any more; the exit code is 0."""

    def load(welcome: Welcome, device: torch.device, progress: Progress) -> Started:
        for done in range(1000):
            progress("weights", done, 1000)
            time.sleep(0.01)
        raise AssertionError("was not stopped")

    code = alive(load)
    engine.admit()
    engine.say(Stop())
    assert code.result(10) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_a_wrong_option() -> None:
    """It says what torch sees and what works."""
    with pytest.raises(OptionError, match="torch sees no CUDA device here; use device=cpu"):
        live(Config(engine="tcp://127.0.0.1:1", device="cuda"), arithmetic)
