"""Long work in threads: bounded, and nobody on the loop waits for it."""

import asyncio
import threading
import time

import pytest

from toka.api.aside import THREADS, aside


async def test_no_more_than_so_many_at_once() -> None:
    """The rest waits for its turn, and all of it is done."""
    lock, now, most = threading.Lock(), 0, 0

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1

    await asyncio.gather(*(aside(work) for _ in range(4 * THREADS)))
    assert (now, most) == (0, THREADS)


async def test_the_loop_goes_on() -> None:
    """Though every thread is busy and more work waits."""
    go = threading.Event()
    waiting = [asyncio.create_task(aside(go.wait)) for _ in range(2 * THREADS)]
    for _ in range(100):
        await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    go.set()
    await asyncio.gather(*waiting)


async def test_who_leaves_the_queue_is_not_worked_for() -> None:
    """What has not begun never does."""
    go, done = threading.Event(), []
    busy = [asyncio.create_task(aside(go.wait)) for _ in range(THREADS)]
    await asyncio.sleep(0)
    left = asyncio.create_task(aside(lambda: done.append("left")))
    stayed = asyncio.create_task(aside(lambda: done.append("stayed")))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    go.set()
    await asyncio.gather(*busy, stayed)
    assert done == ["stayed"]


async def test_what_work_raises_is_raised() -> None:
    """As if it had been called."""
    with pytest.raises(ZeroDivisionError):
        await aside(lambda: 1 // 0)
