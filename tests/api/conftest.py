"""An application in this process, and one behind a real uvicorn."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
import uvloop

from tests.api.fakes import FakeServer, FakeTemplate
from tests.fakes import write_byte_tokenizer
from toka.api.app import App, create_app
from toka.config import Config
from toka.text.tokenizer import Tokenizer

NAMES = ("tiny", "org/alias")
CREATED = 1_700_000_000


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token for each byte."""
    return Tokenizer.load(write_byte_tokenizer(Path(tmp_path_factory.mktemp("tokenizer"))))


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def template() -> FakeTemplate:
    return FakeTemplate()


@pytest.fixture
def make(server: FakeServer, template: FakeTemplate, tokenizer: Tokenizer) -> Callable[..., App]:
    """An application with some options of its own."""

    def make(**options: object) -> App:
        return create_app(Config(**options), server, tokenizer, template, NAMES, CREATED)  # type: ignore[arg-type]

    return make


@pytest.fixture
def app(make: Callable[..., App]) -> App:
    return make()


@pytest.fixture(params=["uvloop", "asyncio"])
def port(app: App, request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a real uvicorn that serves the application, on either loop."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http="httptools", ws="none", lifespan="on", access_log=False, log_config=None, timeout_keep_alive=75
    )
    served = uvicorn.Server(config)
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run() -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(served.serve(sockets=[listening]))

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: served.started)
    yield listening.getsockname()[1]
    served.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for another thread."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.002)
