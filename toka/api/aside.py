"""Long work beside the event loop: texts to tokenize and templates to render, large bodies to parse and to compress."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

THREADS = max(2, min(8, (os.cpu_count() or 1) - 1))
"""Pieces of work at once. More of them would not be done sooner, and would leave the loop less of the machine."""

_pool = ThreadPoolExecutor(THREADS, thread_name_prefix="aside")


async def aside(work: Callable[[], T]) -> T:
    """What `work` returns or raises, done in a thread. First come, first served; cancelled, it leaves the queue."""
    return await asyncio.get_running_loop().run_in_executor(_pool, work)
