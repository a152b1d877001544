"""An application in this process, and one behind a real uvicorn."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvloop

from tests.api.fakes import FakeServer, FakeTemplate
from tests.fakes import write_byte_tokenizer, write_tiny_model
from toka.api.app import App, create_app
from toka.config import Config
from toka.http import KEEP_ALIVE, Http
from toka.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

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
    with serving(app, uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop) as port:
        yield port


@contextmanager
def serving(
    app: App,
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    *,
    keep_alive: int = KEEP_ALIVE,
    servers: list[Http] | None = None,
) -> Iterator[int]:
    """The real HTTP server in a thread; yields its port. `servers` gets it."""
    listening = socket.create_server(("127.0.0.1", 0))
    served = Http(app, keep_alive=keep_alive)

    def run() -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(served.serve(sockets=[listening]))

    if servers is not None:
        servers.append(served)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        until(lambda: served.started)
        yield listening.getsockname()[1]
    finally:
        served.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for another thread."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.002)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model of random weights, with a token for each byte."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def logits(tiny: Path) -> Callable[[list[int]], "Tensor"]:
    """Token ids to float32[n, vocab]: what transformers says comes after each."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model.train(False)

    @torch.no_grad()
    def logits(tokens: list[int]) -> "Tensor":
        rows: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
        return rows

    return logits
