"""/metrics, and what the API itself counts."""

import asyncio
import gzip
import json
import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from tests.api import conftest
from tests.api.fakes import FakeServer, FakeTemplate, call, chat, complete
from tests.api.visits import Visit, until
from toka.api.app import App, create_app
from toka.config import Config
from toka.errors import RateLimited, Unavailable
from toka.metrics.record import Metrics
from toka.text.tokenizer import Tokenizer

NAMES = ("tiny", "org/alias")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(Config(), "tiny")


@pytest.fixture
def app(metrics: Metrics, server: FakeServer, template: FakeTemplate, tokenizer: Tokenizer) -> App:
    return create_app(metrics.config, server, tokenizer, template, NAMES, 0, metrics=metrics)


async def test_the_page(app: App) -> None:
    """Plain text that can be parsed; HEAD works, and gzip, and nothing is written to it."""
    answer = await call(app, "GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    names = {family.name for family in text_string_to_metric_families(answer.content.decode())}
    assert {"toka_num_requests_running", "vllm:num_requests_running", "process_cpu_seconds"} <= names
    packed = await call(app, "GET", "/metrics", headers={"accept-encoding": "gzip"})
    assert gzip.decompress(packed.content).startswith(b"# HELP toka_num_requests_running ")
    head = await call(app, "HEAD", "/metrics")
    assert (head.status, head.content) == (200, b"")
    assert (await call(app, "POST", "/metrics")).status == 405


async def test_requests_are_counted_by_route_and_status(app: App, metrics: Metrics, server: FakeServer) -> None:
    """Whatever a client writes in a path is no label of its own."""
    await complete(app, "x")
    await complete(app, "x", stream=True)
    await chat(app, model="no-such-model")
    await call(app, "POST", "/v1/completions/", b"{")
    await call(app, "GET", "/v1/models/tiny")
    await call(app, "GET", "/v1/models/anything/else")
    await call(app, "GET", "/secret/path")
    await call(app, "GET", "/health")
    server.ready = False
    await call(app, "GET", "/health")
    assert metrics.requests == {
        ("/v1/completions", "200"): 2,
        ("/v1/chat/completions", "404"): 1,
        ("/v1/completions", "400"): 1,
        ("/v1/models/{id}", "200"): 1,
        ("/v1/models/{id}", "404"): 1,
        ("other", "404"): 1,
        ("/health", "200"): 1,
        ("/health", "503"): 1,
    }


async def test_rejections_by_reason(app: App, metrics: Metrics, server: FakeServer) -> None:
    """What was not let in has a reason; what is wrong in itself is none of them."""
    await complete(app, "x" * 3000)
    await complete(app, "x", n=-1)
    server.refusal = Unavailable("Stopping.", code="draining")
    await complete(app, "x")
    await complete(app, "x", stream=True)
    server.refusal = RateLimited("Too many.")
    await complete(app, "x")
    assert metrics.rejections == {"context_length_exceeded": 1, "draining": 2, "rate_limit_exceeded": 1}


async def test_no_key_is_a_rejection(server: FakeServer, template: FakeTemplate, tokenizer: Tokenizer) -> None:
    """Those who may not ask are counted, too."""
    metrics = Metrics(Config(api_key="sk-right"), "tiny")
    app = create_app(metrics.config, server, tokenizer, template, NAMES, 0, metrics=metrics)
    assert (await complete(app, "x")).status == 401
    assert metrics.rejections == {"invalid_api_key": 1}
    assert metrics.requests == {("/v1/completions", "401"): 1}


async def test_w_cxl_1_hang_ups_before_the_engine_hears_of_it_are_counted(app: App, metrics: Metrics) -> None:
    """A body half sent is an `abort`, with the status that nobody read; a count of tokens half asked for is none."""

    async def half(path: str) -> None:
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        messages: list[Message] = [{"type": "http.request", "body": b'{"prompt', "more_body": True}]

        async def receive() -> Message:
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            raise AssertionError("an answer to nobody")

        await app(scope, receive, send)

    await half("/v1/completions")
    assert metrics.finished["abort"] == 1
    await half("/v1/chat/completions/batch")
    assert metrics.finished["abort"] == 2
    await half("/tokenize")
    assert metrics.finished["abort"] == 2
    assert metrics.requests["/v1/completions", "499"] == 1


async def test_hang_ups_that_the_engine_hears_of_are_its_own(app: App, metrics: Metrics, server: FakeServer) -> None:
    """The engine counts what it is told to cancel: here nothing is counted twice."""
    server.held = True
    async with Visit(app, "/v1/completions", {"prompt": "x"}, {}) as visit:
        await until(lambda: server.running)
        await visit.left()
    assert len(server.cancelled) == 1
    assert metrics.finished["abort"] == 0
    assert metrics.requests == {("/v1/completions", "499"): 1}


async def test_tokenizing_is_timed(app: App, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request's texts once, in whichever thread; the queue is empty again, also when it goes wrong."""
    seen: list[int] = []
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        seen.append(metrics.tokenizing)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    await complete(app, "short")
    await complete(app, ["a", "b"])
    await call(app, "POST", "/tokenize", {"prompt": "long " * 4000})
    assert metrics.tokenize.count == 3
    assert seen == [1, 1, 1, 1]

    def broken(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        raise ValueError

    monkeypatch.setattr(Tokenizer, "encode", broken)
    assert (await complete(app, "x")).status == 500
    assert metrics.tokenizing == 0


def test_on_a_real_connection(app: App, metrics: Metrics) -> None:
    """Through uvicorn: the page comes beside an answer that nobody waited for."""
    with conftest.serving(app, asyncio.new_event_loop) as port:
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/metrics", None)):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                data = json.dumps(body).encode() if body else b""
                method = "POST" if body else "GET"
                headers = f"Host: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
                connection.sendall(f"{method} {path} HTTP/1.1\r\n{headers}".encode() + data)
                answer = b""
                while received := connection.recv(65536):
                    answer += received
    text = answer.partition(b"\r\n\r\n")[2].decode()
    [requests] = [family for family in text_string_to_metric_families(text) if family.name == "toka_requests"]
    assert [(sample.labels, sample.value) for sample in requests.samples] == [
        ({"endpoint": "/v1/completions", "status": "200"}, 1.0)
    ]
