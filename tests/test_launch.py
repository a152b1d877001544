"""Local workers: they join, they are watched, and none of them is left behind."""

import asyncio
import sys
import time

import pytest

from toka.launch import LocalWorker, manual_command

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


async def process(code: str) -> LocalWorker:
    """A process that runs `code`, once it has said that it is up."""
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert started.stdout
    await started.stdout.readline()
    return LocalWorker(started)


async def test_a_worker_that_ends_early_says_how() -> None:
    """`python -m workers` is started with the control address, and its exit is seen at once."""
    worker = await LocalWorker.start("nonsense://address")
    assert await asyncio.wait_for(worker.ended(), 60) == "ended with code 2"
    assert "code=2" in repr(worker)
    await worker.stop()


async def test_a_killed_worker_names_the_signal() -> None:
    """The kernel's SIGKILL mostly means memory, and the message says which option asks for less."""
    worker = await process("import os; print(flush=True); os.kill(os.getpid(), 9)")
    how = await worker.ended()
    assert how.startswith("was killed by SIGKILL")
    assert "kv_cache_num_tokens" in how


async def test_a_worker_that_leaves_in_time_is_left_alone() -> None:
    """Stopping waits for what the engine asked of it."""
    worker = await process("import time; print(flush=True); time.sleep(0.2)")
    await worker.stop(grace=30)
    assert await worker.ended() == "ended with code 0"


async def test_a_worker_that_has_left_is_not_asked_to() -> None:
    """Without any grace there is still nobody to send a signal to: that is no error."""
    worker = await process("print(flush=True)")
    await worker.ended()
    await worker.stop(grace=0)
    assert await worker.ended() == "ended with code 0"


async def test_a_worker_that_does_not_leave_is_asked_to() -> None:
    """After the grace comes SIGTERM."""
    worker = await process("import time; print(flush=True); time.sleep(60)")
    await worker.stop(grace=0)
    assert await worker.ended() == "was killed by SIGTERM"


async def test_a_worker_that_will_not_leave_is_made_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM is ignored for a while, SIGKILL is not."""
    monkeypatch.setattr("toka.launch.INSIST", 0.2)
    worker = await process(STUBBORN)
    started = time.monotonic()
    await worker.stop(grace=0)
    assert (await worker.ended()).startswith("was killed by SIGKILL")
    assert time.monotonic() - started < 10


def test_the_line_for_a_worker_by_hand_can_be_typed() -> None:
    """It is what the README says, with the address to join."""
    assert manual_command("tcp://127.0.0.1:10211") == "python -m workers engine=tcp://127.0.0.1:10211"
