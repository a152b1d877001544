"""W-HTTP-7: who needs a key, what happens without, and where keys come from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.conftest import serving
from tests.api.fakes import FakeServer, call, chat, post
from toka.api.app import App
from toka.api.keys import Keys, check_reach, is_loopback
from toka.config import Config
from toka.errors import ConfigError

KEY = "sk-first-1"
OTHER = "sk-second-2"


@pytest.fixture
def app(make: Callable[..., App]) -> App:
    """Two keys."""
    return make(api_key=f"{KEY},{OTHER}")


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"content-type": "application/json", "authorization": f"Bearer {key}", **more}


async def test_w_http_7_a_key_opens(app: App, server: FakeServer) -> None:
    """Either key will do, and the scheme's name in any case."""
    for number, sent in ((1, f"Bearer {KEY}"), (2, f"bearer  {OTHER}"), (1, f"BEARER {KEY} ")):
        headers = {"content-type": "application/json", "authorization": sent}
        assert (await call(app, "POST", "/v1/completions", {"prompt": "x"}, headers=headers)).status == 200
        assert server.requests[-1].tenant == f"key-{number}"


WRONG = [
    *("", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer {KEY},{OTHER}"),
    *(f"Bearer {KEY} {OTHER}", f"Bearer {KEY.upper()}", "Bearer \xff\xfe", f"Bearer {KEY}\x00"),
]


@pytest.mark.parametrize("sent", WRONG)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/server_info", "/metrics", "/nosuch", "/"])
async def test_w_http_7_without_it_nothing_does(app: App, server: FakeServer, path: str, sent: str) -> None:
    """No key, a wrong one, half of one: 401 with the error object and `www-authenticate`, on every route."""
    headers = {"content-type": "application/json"} | ({"authorization": sent} if sent else {})
    headers = {name: value.encode("latin1").decode("utf-8", "surrogateescape") for name, value in headers.items()}
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode("utf-8", "surrogateescape")) for name, value in headers.items()],
    }
    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> Any:
        raise AssertionError("the body is not read")

    await app(scope, receive, send)
    assert said[0]["status"] == 401
    sent_headers = dict(said[0]["headers"])
    assert sent_headers[b"www-authenticate"] == b"Bearer"
    assert sent_headers[b"x-request-id"]
    assert server.requests == []


async def test_w_err_2_wrong_key(app: App) -> None:
    """The row of the table; the message repeats no key and says what to send."""
    for headers, word in ((bearer("sk-wrong"), "Incorrect"), ({"content-type": "application/json"}, "Bearer YOUR_KEY")):
        answer = await call(app, "GET", "/v1/models", headers=headers)
        assert answer.status == 401
        error = answer.error
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
        assert word in error["message"]
        assert "sk-" not in error["message"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version", "/health/"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_w_http_7_probes_need_none(app: App, path: str, method: str) -> None:
    """Whoever asks whether there is a server needs no key."""
    assert (await call(app, method, path)).status == 200


async def test_w_http_7_options_needs_none(app: App) -> None:
    """OPTIONS is answered as without keys: browsers send no header with it."""
    assert (await call(app, "OPTIONS", "/v1/models")).status == 405


async def test_w_http_7_metrics_if_told_so(make: Callable[..., App]) -> None:
    """/metrics needs a key, unless `metrics_without_key` says otherwise."""
    assert (await call(make(api_key=KEY), "GET", "/metrics")).status == 401
    assert (await call(make(api_key=KEY, metrics_without_key=True), "GET", "/metrics")).status != 401


async def test_w_http_7_all_keys_are_compared(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever key is sent, and whether it is right: as many comparisons in constant time as there are keys."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("toka.api.keys.hmac.compare_digest", compare)
    for key in (KEY, OTHER, "sk-wrong", "x" * 10_000):
        compared.clear()
        await call(app, "GET", "/v1/models", headers=bearer(key))
        assert len(compared) == 2
        assert {len(one) for pair in compared for one in pair} == {32}


def test_w_http_7_as_the_client_sees_it(app: App) -> None:
    """OpenAI's client sends its key so, and raises AuthenticationError for a wrong one, without trying again."""
    with serving(app) as port:
        base = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=base, api_key=KEY) as client:
            assert client.completions.create(model="tiny", prompt="x").choices[0].text
        with openai.OpenAI(base_url=base, api_key="sk-wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


async def test_without_keys_nobody_needs_one(make: Callable[..., App]) -> None:
    """And one that is sent is not looked at."""
    app = make()
    assert (await chat(app)).status == 200
    assert (await call(app, "GET", "/v1/models", headers=bearer("anything"))).status == 200


async def test_keys_are_not_shown(app: App, make: Callable[..., App], tmp_path: Path) -> None:
    """/server_info tells the options, but no key; nor do representations."""
    file = tmp_path / "keys"
    file.write_text("sk-filed\n")
    for one, key in ((app, KEY), (make(api_key_file=str(file)), "sk-filed")):
        answer = await call(one, "GET", "/server_info", headers=bearer(key))
        assert answer.status == 200
        assert b"sk-" not in answer.content
        assert answer.json["config"]["max_n"] == 128
    assert repr(Keys([KEY, OTHER])) == "<Keys: 2>"


async def test_a_fingerprint_does_not_tell_keys(make: Callable[..., App]) -> None:
    """`system_fingerprint` is the same with another key: it changes no output."""
    answers = [
        await call(make(api_key=key), "POST", "/v1/completions", {"prompt": "x"}, headers=bearer(key))
        for key in (KEY, OTHER)
    ]
    assert len({answer.json["system_fingerprint"] for answer in answers}) == 1


@pytest.mark.parametrize("isolation", ["none", "key"])
async def test_a_key_is_a_cache_salt_if_told_so(make: Callable[..., App], server: FakeServer, isolation: str) -> None:
    """With cache_isolation=key requests of two keys share no salt, whatever cache_salt they send; else they do."""
    app = make(api_key=f"{KEY},{OTHER}", cache_isolation=isolation)
    for key in (KEY, OTHER):
        for body in ({"prompt": "x"}, {"prompt": "x", "cache_salt": "mine"}):
            await call(app, "POST", "/v1/completions", body, headers=bearer(key))
    salts = [request.cache_salt for request in server.requests]
    assert len(salts) == 4
    assert len(set(salts)) == (4 if isolation == "key" else 2)


async def test_bulk_requests_are_their_keys_too(app: App, server: FakeServer) -> None:
    """All requests of a body belong to who sent it."""
    body = [{"messages": [{"role": "user", "content": "Hi"}]}] * 2
    answer = await post(app, "chat/completions/batch", body, headers=bearer(OTHER))
    assert answer.status == 200
    assert [request.tenant for request in server.requests] == ["key-2", "key-2"]


def test_a_file_of_keys(tmp_path: Path) -> None:
    """One a line; blank lines and comments do not count; keys of both options are taken."""
    file = tmp_path / "keys"
    file.write_text("# of the team\n\nsk-a  # alice\n  sk-b\n", encoding="utf-8")
    assert len(Keys.load(Config(api_key_file=str(file)))) == 2
    assert len(Keys.load(Config(api_key_file=str(file), api_key="sk-c, sk-d,sk-a"))) == 4


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), (b"# none\n\n", "there is no key in it"), (b"sk-a sk-b", "key 1"), (b"\xff\xfe", "text")],
)
def test_a_file_without_keys_is_refused(tmp_path: Path, content: bytes | None, says: str) -> None:
    """Missing, empty, or not keys: one line that names the option, and no key."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        Keys.load(Config(api_key_file=str(file)))
    assert str(caught.value).startswith(f"api_key_file={file}: ")
    assert "\n" not in str(caught.value)
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize("value", ["", ",", "sk-a,", "sk-a,s k", "schlüssel"])
def test_what_is_no_key_is_refused(value: str) -> None:
    """Empty, or with what a header cannot carry. The line does not repeat it."""
    with pytest.raises(ConfigError, match="api_key=…: key ") as caught:
        Keys.load(Config(api_key=value))
    assert "sk-" not in str(caught.value)


def test_isolation_needs_keys() -> None:
    """cache_isolation=key without keys would keep nobody apart."""
    with pytest.raises(ConfigError, match="cache_isolation=key"):
        Keys.load(Config(cache_isolation="key"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", ""])
def test_others_are_served_with_a_key_or_when_told_so(host: str) -> None:
    """An address that is not loopback: refused in one line that says what to do, unless there is a key or a word."""
    with pytest.raises(ConfigError, match=r"api_key_file=…, .*allow_unauthenticated=T") as caught:
        check_reach(Config(host=host), Keys())
    assert "\n" not in str(caught.value)
    check_reach(Config(host=host), Keys([KEY]))
    check_reach(Config(host=host, allow_unauthenticated=True), Keys())
    check_reach(Config(host=host, uds="/run/toka.sock"), Keys())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    """Only this machine reaches it."""
    assert is_loopback(host)
    check_reach(Config(host=host), Keys())
