"""W-HTTP, W-SSE and W-CXL as they are on a real connection: what the HTTP server is told, and what it does."""

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
import uvloop

from tests.api.conftest import serving, until
from tests.api.fakes import FakeServer
from tests.api.test_connection import connect, get
from toka.api.app import App
from toka.api.generate import Generate
from toka.api.stream import SILENCE
from toka.errors import EngineFault
from toka.http import KEEP_ALIVE, Http
from toka.text.tokenizer import Tokenizer


def raw(port: int, data: bytes) -> bytes:
    """All that comes back for these bytes until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(data)
        received = b""
        while part := connection.recv(65536):
            received += part
    return received


# W-HTTP


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"GET /health\r\nHost x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    ],
    ids=lambda data: repr(data[:30]),
)
def test_w_err_1_what_is_no_http(port: int, data: bytes) -> None:
    """Bytes that are no request get the error object and a request id too, and the connection ends."""
    head, _, body = raw(port, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    assert b"x-request-id: req_" in head
    error = json.loads(body)["error"]
    assert error == {
        "message": "What was received is not an HTTP request.",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


def test_w_err_1_no_http_behind_the_beginning_of_a_stream(port: int, server: FakeServer) -> None:
    """An answer that has begun is cut off: the error would stand inside it."""
    server.pause = 0.2
    server.script = lambda request, index: ["a", "b", "c"]
    with ask(port, "/v1/completions", {"prompt": "x", "stream": True}) as connection:
        received = connection.recv(65536)
        connection.sendall(b"hello\r\n\r\n")
        while part := connection.recv(65536):
            received += part
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert received.count(b"HTTP/1.1") == 1
    until(lambda: not server.running)


def test_w_http_10_a_head_without_end(port: int) -> None:
    """The parser would take headers of any size, and copy what it has at each read: they have a bound, too."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ")
        received = b""
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                connection.sendall(b"a" * 65536)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                received += part
    if received:  # what was sent in vain may have reset the connection before
        assert received.startswith(b"HTTP/1.1 431 ")
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"
    fitting = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    fitting.request("GET", "/health", headers={"x-long": "a" * 32768})
    assert fitting.getresponse().status == 200
    fitting.close()


UPGRADES = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
    "websocket": b"Connection: keep-alive, upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
}
"""What Java's HTTP client offers with every request, and curl with --http2; and what browsers do."""


@pytest.mark.parametrize("offer", UPGRADES)
@pytest.mark.parametrize("pieces", [1, 3, 1000])
def test_w_http_9_another_protocol_is_declined(
    port: int, server: FakeServer, caplog: pytest.LogCaptureFixture, offer: str, pieces: int
) -> None:
    """A request that offers another protocol is answered in this one, its body and what is pipelined behind it too."""
    body = b'{"prompt": "Hello", "max_tokens": 3, "echo": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + UPGRADES[offer]
    post = head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    last = b"GET /version HTTP/1.1\r\nHost: x\r\n%b\r\n" % UPGRADES[offer].replace(b": ", b": close, ", 1)
    data = post + chunked + last
    size = -(-len(data) // pieces)
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        for start in range(0, len(data), size):
            connection.sendall(data[start : start + size])
        while part := connection.recv(65536):
            received += part
    assert received.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert received.count(b'"text":"Hello') == 2
    assert b"upgrade" not in received.lower()
    assert "upgrade" not in caplog.text.lower()


def test_w_http_9_many_declined_at_once(port: int) -> None:
    """However many such requests one read brings, each has its answer."""
    one = b"GET /version HTTP/1.1\r\nHost: x\r\n" + UPGRADES["h2c"]
    received = raw(port, (one + b"\r\n") * 500 + one.replace(b": Upgrade", b": close, Upgrade") + b"\r\n")
    assert received.count(b"HTTP/1.1 200 OK\r\n") == 501


def test_connect_is_refused(port: int) -> None:
    """It asks for a tunnel, behind which no HTTP follows."""
    assert raw(port, b"CONNECT /health HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert raw(port, b"CONNECT a:80 HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_w_http_2_the_client_surfaces_it(port: int) -> None:
    """The OpenAI client finds the id on answers and on errors."""
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(model="tiny", prompt="x", extra_headers={"X-Request-Id": "mine-1"})
    assert answer._request_id == "mine-1"
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(model="none", prompt="x", extra_headers={"X-Request-Id": "mine-2"})
    assert raised.value.request_id == "mine-2"
    client.close()


def test_w_http_2_in_the_logs(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """What goes wrong is logged under the request's id."""
    with caplog.at_level(logging.DEBUG, "toka.api"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/nosuch", headers={"x-request-id": "seen-in-logs"})
        connection.getresponse().read()
        connection.close()
    assert "seen-in-logs" in caplog.text


def test_w_http_4_retry_count_is_harmless(port: int) -> None:
    """The header that the OpenAI client sends with a retry changes nothing."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/v1/completions", '{"prompt":"x"}', {"x-stainless-retry-count": "2"})
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_w_http_4_the_first_is_cut_off(port: int, server: FakeServer, stream: bool) -> None:
    """A client whose connection breaks after it has sent the request again gets the answer on the new one."""
    server.pause = 0.4
    server.script = lambda request, index: ["Hello"]
    body = {"prompt": "x", "stream": stream}
    key = "Idempotency-Key: mine\r\n"
    with ask(port, "/v1/completions", body, key), ask(port, "/v1/completions", body, key) as other:
        until(lambda: len(server.running) == 1)
        with ask(port, "/v1/completions", body, key):
            time.sleep(0.05)
        time.sleep(0.05)
        assert server.cancelled == []
        assert b"Hello" in other.recv(65536)
    assert len(server.requests) == 1


def test_w_http_5_a_client_that_gives_up_and_retries(port: int, server: FakeServer) -> None:
    """Whoever is tired of waiting hangs up: of its three attempts never more than one runs, and none at the end."""
    server.held = True
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=2, timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model="tiny", prompt="x")
    client.close()
    until(lambda: len(server.cancelled) == 3, 2.0)
    assert len(server.requests) == 3
    assert server.running == {}


def test_w_http_5_no_limit_of_our_own(app: App, server: FakeServer) -> None:
    """An answer may take as long as the client waits: nothing but keep-alive has a time, and that is for idle ones."""
    server.pause = 1.5
    server.script = lambda request, index: ["late"]
    with serving(app, keep_alive=1) as port:
        start = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("POST", "/v1/completions", '{"prompt":"x"}')
        assert connection.getresponse().status == 200
        assert time.monotonic() - start >= 1.5
        connection.close()


def idle(port: int, seconds: float) -> bool:
    """Whether a connection that was used once is still open after so many seconds of idleness."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.settimeout(seconds)
        try:
            return connection.recv(1) != b""
        except TimeoutError:
            return True


def test_w_http_6_keep_alive(app: App) -> None:
    """Idle connections stay for 75 seconds or more, and the option that says so is heeded."""
    assert KEEP_ALIVE >= 75
    assert Http(app).config.timeout_keep_alive == KEEP_ALIVE
    with serving(app, keep_alive=1) as port:
        assert idle(port, 0.6)
        assert not idle(port, 5)


def test_w_http_6_many_connections(app: App, server: FakeServer) -> None:
    """Hundreds at once, each with a request, and all of them are used again."""
    server.pause = 0.05
    with serving(app) as port, contextlib.ExitStack() as stack:
        connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=30) for _ in range(300)]
        for connection in connections:
            stack.callback(connection.close)
        for _ in range(2):
            for connection in connections:
                connection.request("POST", "/v1/completions", '{"prompt":"x"}')
            assert {connection.getresponse().read()[-1:] for connection in connections} == {b"}"}
    assert len(server.requests) == 600


def test_w_http_10_a_body_that_is_too_large(make: Callable[..., App]) -> None:
    """413 for a body of any kind of length; the client that is still sending gets to read it."""
    with serving(make(max_body_bytes=100_000)) as port:
        for chunked in (False, True):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            body = iter([b"x" * 50_000] * 60) if chunked else b"x" * 3_000_000
            connection.request("POST", "/v1/completions", body, encode_chunked=chunked)
            response = connection.getresponse()
            assert response.status == 413
            assert json.loads(response.read())["error"]["code"] == "request_too_large"
            connection.close()


# W-SSE


def test_w_sse_2_done_ends_the_stream(port: int) -> None:
    """Exactly one `data: [DONE]`, and not a byte behind it."""
    with connect(port, {"prompt": "x", "stream": True}) as connection:
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            part = connection.recv(65536)
            assert part
            received += part
    assert received.count(b"[DONE]") == 1
    assert received.removesuffix(b"\r\n0\r\n\r\n").endswith(b"data: [DONE]\n\n")


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second of silence is enough."""
    monkeypatch.setattr(Generate, "silence", 0.1)


@pytest.mark.usefixtures("quick_pings")
def test_w_sse_3_pings_while_queued(port: int, server: FakeServer) -> None:
    """Comments come as long as nothing else does, and the OpenAI client does not mind them."""
    assert SILENCE == 15
    server.held = True
    with connect(port, {"prompt": "x", "stream": True}) as connection:
        received = b""
        while received.count(b": ping\n\n") < 3:
            received += connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 200")
        assert b"data:" not in received
    server.held = False
    server.pause = 0.25
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    with client.completions.create(model="tiny", prompt="x", stream=True) as chunks:
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello, world!"
    client.close()


@pytest.mark.usefixtures("quick_pings")
def test_w_sse_3_not_while_there_is_text(port: int, server: FakeServer) -> None:
    """A stream that goes on has no pings."""
    server.pause = 0.02
    server.script = lambda request, index: ["x"] * 20
    with connect(port, {"prompt": "x", "stream": True, "max_tokens": 20}) as connection:
        received = b""
        while b"[DONE]" not in received:
            received += connection.recv(65536)
    assert received.count(b": ping") <= 1


def test_w_sse_7_tcp_nodelay(app: App, server: FakeServer) -> None:
    """Small writes are sent at once, on either loop."""
    server.held = True
    for factory in (uvloop.new_event_loop, asyncio.new_event_loop):
        servers: list[Http] = []
        with serving(app, factory, servers=servers) as port, connect(port, {"prompt": "x", "stream": True}):
            until(lambda: bool(server.running))
            [protocol] = servers[0].server_state.connections
            other = protocol.transport.get_extra_info("socket")
            assert other.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        until(lambda: not server.running)


def test_w_sse_7_each_step_at_once(port: int, server: FakeServer) -> None:
    """What a step brings is read before the next step is made, though nothing pushes it."""
    server.pause = 0.1
    server.script = lambda request, index: [f"<{step}>" for step in range(5)]
    with connect(port, {"prompt": "x", "stream": True}) as connection:
        received, times = b"", []
        while b"[DONE]" not in received:
            received += connection.recv(65536)
            times.append(time.monotonic())
    assert len(times) >= 5
    assert times[4] - times[0] > 0.3, "they came one by one"


def test_w_err_7_an_error_ends_the_response(port: int, server: FakeServer) -> None:
    """The event, `[DONE]`, and the end of the response; the OpenAI client raises what it says."""
    server.failure, server.break_at = EngineFault("broken"), 2
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    with (
        client.completions.create(model="tiny", prompt="x", stream=True) as chunks,
        pytest.raises(openai.APIError, match="broken"),
    ):
        list(chunks)
    client.close()
    with connect(port, {"prompt": "x", "stream": True}) as connection:
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(65536)
    assert received.index(b'"error":{') < received.index(b"data: [DONE]\n\n")


# W-CXL


@pytest.mark.parametrize(
    ("path", "stream"),
    [("/v1/completions", False), ("/v1/completions", True), ("/v1/chat/completions/batch", False)],
)
def test_w_cxl_1_tokenizing(
    port: int, server: FakeServer, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """A client that hangs up while its text is tokenized leaves nothing for the engine."""
    asked, go = threading.Event(), threading.Event()

    def slow(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        asked.set()
        assert go.wait(10)
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", slow)
    text = "word " * 2000
    chat = [{"messages": [{"role": "user", "content": text}], "max_tokens": 1}]
    body: Any = chat if path.endswith("batch") else {"prompt": text, "stream": stream, "truncate_prompt_tokens": 9}
    with ask(port, path, body):
        assert asked.wait(10)
    time.sleep(0.05)
    go.set()
    assert get(port, "/health") == 200
    time.sleep(0.05)
    assert server.requests == []


def ask(port: int, path: str, body: object, headers: str = "") -> socket.socket:
    """A connection on which a POST is under way."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data
    )
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_w_cxl_1_all_prompts_and_samples(port: int, server: FakeServer, stream: bool) -> None:
    """One request with several prompts and samples is given back as a whole, at once."""
    server.pause = 0.001
    server.script = lambda request, index: ["word "] * 10_000
    with connect(port, {"prompt": ["a", "b", "c"], "n": 4, "stream": stream, "max_tokens": 2000}):
        until(lambda: bool(server.running) and next(iter(server.running.values())).step > 3)
        left = time.monotonic()
    until(lambda: len(server.cancelled) == 1, 1.0)
    assert time.monotonic() - left < 1.0, "ten times the tenth of a second that is meant"
    assert server.running == {}


def test_w_cxl_1_many_chats(port: int, server: FakeServer) -> None:
    """Bulk requests: all of them."""
    server.held = True
    chat = {"messages": [{"role": "user", "content": "x"}]}
    with ask(port, "/v1/chat/completions/batch", [chat] * 5):
        until(lambda: len(server.running) == 5)
    until(lambda: len(server.cancelled) == 5, 1.0)
