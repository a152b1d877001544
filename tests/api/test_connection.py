"""W-CXL and W-SSE-9 through a real uvicorn, on uvloop and on asyncio's own loop: hang-ups and slow readers."""

import http.client
import json
import logging
import socket
import time
from typing import Any

import pytest

from tests.api.conftest import until
from tests.api.fakes import FakeServer


def connect(port: int, body: dict[str, Any], buffer: int | None = None, length: int | None = None) -> socket.socket:
    """A connection on which a completion has been asked for; `length`: the body's, if not the true one."""
    raw = json.dumps(body).encode()
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length or len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def get(port: int, path: str) -> int:
    """The status of a GET."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("stream", [False, True])
def test_w_cxl_1_queued(port: int, server: FakeServer, stream: bool) -> None:
    """A client that hangs up while its request waits gets it cancelled."""
    server.held = True
    with connect(port, {"prompt": "x", "n": 3, "stream": stream}):
        until(lambda: len(server.running) == 1)
    until(lambda: len(server.cancelled) == 1, 2.0)
    assert server.running == {}
    assert get(port, "/health") == 200


@pytest.mark.parametrize("stream", [False, True])
def test_w_cxl_1_running(port: int, server: FakeServer, stream: bool) -> None:
    """The same in the middle of an answer."""
    server.script = lambda request, index: ["word "] * 10_000
    server.pause = 0.001
    with connect(port, {"prompt": "x", "stream": stream, "max_tokens": 2000, "n": 2}) as connection:
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        else:
            until(lambda: len(server.running) == 1)
    until(lambda: len(server.cancelled) == 1, 2.0)
    assert server.running == {}


def test_w_cxl_1_upload(port: int, server: FakeServer) -> None:
    """A client that hangs up before its body is complete leaves nothing behind."""
    with connect(port, {"prompt": "x"}, length=1000):
        assert get(port, "/health") == 200
    time.sleep(0.05)
    assert get(port, "/health") == 200
    assert server.requests == []


def test_finished_requests_are_not_cancelled(port: int, server: FakeServer) -> None:
    """Nor is anything else left of them; the connection is used again."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    for stream in (False, True, False, True):
        body = json.dumps({"prompt": "x", "stream": stream})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        assert b"world" in response.read()
    connection.close()
    until(lambda: server.running == {})
    assert server.cancelled == []


def test_w_sse_9_slow_reader(port: int, server: FakeServer) -> None:
    """A client that does not read gets everything when it does; others are served meanwhile."""
    pieces = [f"piece {number} of the text, long enough to fill the buffers between; " for number in range(30_000)]
    server.script = lambda request, index: pieces
    server.max_model_len = 10**6
    with connect(port, {"prompt": "x", "stream": True, "max_tokens": len(pieces)}, buffer=4096) as connection:
        until(lambda: len(server.requests) == 1)
        until(lambda: not server.running, 60.0)
        assert get(port, "/health") == 200
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            part = connection.recv(1 << 20)
            assert part, "the stream ends with its last chunk"
            received += part
    events = events_of(received)
    assert "".join(event["choices"][0]["text"] for event in events) == "".join(pieces)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert received.count(b"[DONE]") == 1
    assert len(events) < len(pieces) * 0.8, "what came while the client did not read was joined"


def test_w_sse_9_slow_reader_hangs_up(port: int, server: FakeServer) -> None:
    """A client that goes away with its buffers full is noticed too."""
    server.script = lambda request, index: ["x" * 10_000] * 100_000
    server.max_model_len = 10**6
    server.pause = 0.002
    with connect(port, {"prompt": "x", "stream": True, "max_tokens": 100_000}, buffer=4096):
        until(lambda: len(server.requests) == 1)
        time.sleep(0.3)
    until(lambda: len(server.cancelled) == 1, 2.0)
    assert get(port, "/health") == 200


def test_head_and_percent_encoding(port: int) -> None:
    """HEAD ends, and a model's id may be sent with its slash encoded."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("HEAD", "/v1/models")
    assert connection.getresponse().read() == b""
    connection.request("GET", "/v1/models/org%2Falias")
    assert json.loads(connection.getresponse().read())["id"] == "org/alias"
    connection.close()


def events_of(received: bytes) -> list[Any]:
    """The events of a chunked response."""
    _, _, rest = received.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        rest = rest[length + 2 :]
    return [json.loads(event[6:]) for event in body.split(b"\n\n") if event.startswith(b"data: {")]


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_is_no_error(port: int, server: FakeServer, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Clients that hang up just as their answer is written leave no error in the log, whoever notices first."""
    for number in range(200):
        with connect(port, {"prompt": "x", "stream": stream}):
            if number % 2:
                until(lambda count=number: len(server.requests) > count // 2)  # type: ignore[misc]
    until(lambda: not server.running)
    assert get(port, "/health") == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
