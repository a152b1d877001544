"""W-HTTP, W-MOD, W-VER: routes, methods, headers."""

import logging
from collections.abc import Callable

import msgspec
import pytest
from starlette.types import Message

from tests.api.fakes import FakeServer, call, post
from toka.api.app import HARMLESS, App, fingerprint
from toka.config import Config

GETS = ["/v1/models", "/v1/models/tiny", "/health", "/ready", "/version", "/ping", "/server_info"]


async def test_w_http_1_json(app: App) -> None:
    """A whole answer is JSON with its length."""
    answer = await post(app, "completions", {"prompt": "x"})
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(answer.content)


async def test_w_http_1_stream(app: App) -> None:
    """A stream says that it is one and that nobody may keep it back."""
    headers = (await post(app, "completions", {"prompt": "x", "stream": True})).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "content-length" not in headers


@pytest.mark.parametrize("id", ["abc", "A-b_c.d:e", "x" * 128])
async def test_w_http_2_request_id_is_echoed(app: App, id: str) -> None:
    """The client's own id comes back, on answers, errors and streams."""
    for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}, {}):
        assert (await post(app, "completions", body, headers={"x-request-id": id})).headers["x-request-id"] == id
    assert (await call(app, "GET", "/nosuch", headers={"x-request-id": id})).headers["x-request-id"] == id


@pytest.mark.parametrize("id", ["", "a b", "x" * 129, "é", "a\n"])
async def test_w_http_2_request_id_is_made(app: App, id: str) -> None:
    """An id that is not fit to print is replaced by a new one, a new one each time."""
    answers = [await post(app, "completions", {"prompt": "x"}, headers={"x-request-id": id}) for _ in range(2)]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2
    assert all(one.startswith("req_") for one in ids)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD", "FROB"])
async def test_w_http_8_wrong_method_on_post(app: App, method: str) -> None:
    """405 with `allow` and the error object; OPTIONS is never a 401."""
    answer = await call(app, method, "/v1/chat/completions")
    assert answer.status == 405
    assert answer.headers["allow"] == "POST"
    if method != "HEAD":
        assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", GETS)
async def test_w_http_8_methods_of_get(app: App, path: str) -> None:
    """GET and HEAD, the latter without a body and with the same length; nothing else."""
    got = await call(app, "GET", path)
    head = await call(app, "HEAD", path)
    assert got.status == head.status == 200
    assert head.content == b""
    assert head.headers["content-length"] == got.headers["content-length"] == str(len(got.content))
    posted = await call(app, "POST", path, {})
    assert posted.status == 405
    assert posted.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/x"), ("GET", "/nosuch"), ("GET", "/"), ("GET", "/v1//models")]
)
async def test_w_http_8_unknown_path(app: App, method: str, path: str) -> None:
    """404 in the same shape."""
    answer = await call(app, method, path)
    assert answer.status == 404
    assert answer.error["message"] == f"Unknown request URL: {method} {path}."
    assert answer.error["code"] is None


async def test_w_http_8_trailing_slash(app: App) -> None:
    """Served like the path without it; never a redirect, which drops the body."""
    assert (await post(app, "completions/", {"prompt": "x"})).status == 200
    assert (await call(app, "GET", "/v1/models/")).json["object"] == "list"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.api+json", 200),
        ("", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
async def test_w_http_9_content_type(app: App, kind: str, status: int) -> None:
    """JSON, or nothing said."""
    assert (await post(app, "completions", {"prompt": "x"}, headers={"content-type": kind})).status == status


async def test_w_http_9_no_content_type(app: App) -> None:
    """A missing header is no refusal."""
    assert (await post(app, "completions", {"prompt": "x"}, headers={})).status == 200


async def test_w_http_10_content_encoding(app: App) -> None:
    """An encoded body is refused."""
    refused = await post(app, "completions", b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert refused.status == 415
    assert "content-encoding" in refused.error["message"]
    assert (await post(app, "completions", {"prompt": "x"}, headers={"content-encoding": "identity"})).status == 200


async def test_w_http_10_body_in_parts(app: App, server: FakeServer) -> None:
    """A body may come in pieces."""
    assert (await post(app, "completions", None, parts=[b'{"prom', b'pt":"a', b'b"}'])).status == 200
    assert server.requests[0].prompts == [[97, 98]]


async def test_w_ver_1_health(app: App, server: FakeServer) -> None:
    """Empty and 200 while a request would start, else 503."""
    for path in ("/health", "/ready"):
        server.ready = True
        answer = await call(app, "GET", path)
        assert (answer.status, answer.content) == (200, b"")
        server.ready = False
        answer = await call(app, "GET", path)
        assert answer.status == 503
        assert answer.error["code"] == "not_ready"


async def test_w_ver_1_version_and_ping(app: App) -> None:
    """What is running, and that it is."""
    assert set((await call(app, "GET", "/version")).json) == {"version"}
    assert (await call(app, "GET", "/ping")).json == {"message": "pong"}


async def test_server_info(app: App) -> None:
    """The engine's figures beside the options and the version."""
    info = (await call(app, "GET", "/server_info")).json
    assert info["free_blocks"] == 64
    assert info["config"]["port"] == 10210
    assert info["version"] == (await call(app, "GET", "/version")).json["version"]


async def test_w_chat_12_fingerprint(make: Callable[..., App]) -> None:
    """It changes if and only if an option changes that can change outputs."""
    one, same, other = make(), make(port=1, log_level="error"), make(dtype="bfloat16")
    prints = [
        (await post(app, "completions", {"prompt": "x"})).json["system_fingerprint"] for app in (one, same, other)
    ]
    assert prints[0] == prints[1] != prints[2]
    assert fingerprint(Config(), "1") != fingerprint(Config(), "2")


def test_w_chat_12_harmless_options_exist() -> None:
    """The options that are left out of the fingerprint are options."""
    assert set(Config.__struct_fields__) >= HARMLESS
    assert msgspec.structs.asdict(Config()).keys() > HARMLESS


async def test_websockets_are_closed(app: App) -> None:
    """Nothing here speaks WebSocket."""
    sent = []

    async def send(message: object) -> None:
        sent.append(message)

    await app({"type": "websocket", "path": "/v1/completions", "headers": []}, None, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1000}]


async def test_a_write_that_fails_is_a_hang_up(app: App, caplog: pytest.LogCaptureFixture) -> None:
    """uvloop raises when a closed connection is written to: the client has gone, nothing more has happened."""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise RuntimeError("the handler is closed")

    scope = {"type": "http", "method": "GET", "path": "/ping", "headers": []}
    await app(scope, receive, send)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
