"""What all tests of workers share."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.workers.engine import Engine


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and threads that wait for each other lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A scripted engine on real sockets."""
    with Engine() as engine:
        yield engine


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    """Threads for what must wait while the test plays the other side."""
    with ThreadPoolExecutor() as pool:
        yield pool
