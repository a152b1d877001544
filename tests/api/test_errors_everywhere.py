"""W-ERR: what holds for every error, wherever it comes from."""

import re
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.api.fakes import FakeServer, call, post
from toka.api.app import App
from toka.errors import RequestError, Unavailable

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"prompt": "Hi"}
BOTH: list[tuple[str, dict[str, Any]]] = [("completions", TEXT), ("chat/completions", CHAT)]
POSTS = ["/v1/chat/completions", "/v1/completions", "/v1/chat/completions/batch", "/tokenize", "/detokenize"]
TYPES = {
    "invalid_request_error",
    "permission_error",
    "rate_limit_error",
    "server_error",
    "timeout_error",
}
"""The closed list."""


def routes(app: App) -> list[str]:
    return [route.path.replace("{id:path}", "none") for route in app._router.routes]  # type: ignore[attr-defined]


async def test_w_err_1_every_route_and_method(app: App, server: FakeServer) -> None:
    """Whatever is answered and is no success has exactly the four keys, a type of the list, and a slug or null."""
    server.ready = False
    server.refusal = Unavailable("no")
    failed = 0
    for path in [*routes(app), "/", "/nosuch", "/v1/files/file-1", "/v1/batches"]:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            for body in (b"", b"{}", b"[]", b'{"prompt":"x"}', b'{"tokens":[-1]}'):
                answer = await call(app, method, path, body)
                if 200 <= answer.status < 300:
                    continue
                failed += 1
                assert answer.headers["content-type"] == "application/json"
                assert answer.headers["x-request-id"]
                error = answer.error
                assert isinstance(error["message"], str)
                assert error["message"]
                assert error["type"] in TYPES
                for name in ("param", "code"):
                    assert error[name] is None or re.fullmatch(r"[a-z_0-9.\[\]]+", error[name])
    assert failed > 400


def test_w_err_1_every_class_has_a_type_of_the_list() -> None:
    """Also those that cannot be brought about yet."""
    classes = [RequestError]
    for one in classes:
        classes.extend(one.__subclasses__())
        assert one.type in TYPES
        assert 400 <= one.status < 600
        assert one.status != 422
    assert len(classes) > 10


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"logprobs_format": "arrays"}, ("'lists'", "'packed'")),
        ({"reasoning_effort": "some"}, ("'none'", "'low'", "'medium'", "'high'")),
        ({"messages": [{"role": "robot", "content": "x"}]}, ("system", "developer", "user", "assistant", "tool")),
    ],
)
async def test_w_err_2_bad_value(app: App, server: FakeServer, fields: dict[str, Any], values: tuple[str, ...]) -> None:
    """A value that is none of a few: 400, invalid_value, and the message lists them."""
    answer = await post(app, "chat/completions", CHAT | fields)
    assert (answer.status, answer.error["code"]) == (400, "invalid_value")
    assert answer.error["param"].split(".")[0].split("[")[0] in fields
    assert all(value in answer.error["message"] for value in values)
    assert server.requests == []


@pytest.mark.parametrize("field", ["response_format", "guided_json", "regex", "bad_words"])
async def test_w_err_2_not_supported(app: App, server: FakeServer, field: str) -> None:
    """A field that is known, not served and not at its default is refused by name, on both endpoints."""
    for path, body in BOTH:
        answer = await post(app, path, body | {field: ["x"]})
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        assert (answer.error["param"], answer.error["code"]) == (field, "unsupported_parameter")
        assert (await post(app, path, body | {field: None})).status == 200
    assert len(server.requests) == 2


async def test_w_err_2_context_length(app: App) -> None:
    """The prompt, or the prompt and what it needs: 400, context_length_exceeded, the field of the prompt."""
    for path, body in (
        ("completions", {"prompt": [1] * 3000}),
        ("completions", TEXT | {"max_tokens": 3000}),
        ("chat/completions", CHAT | {"max_tokens": 3000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 3000}]}),
    ):
        error = (await post(app, path, body)).error
        assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
        assert error["param"] == ("messages" if "chat" in path else "prompt")


@pytest.mark.parametrize("path", ["/v1/files/file-1", "/v1/batches/batch_1", "/v1/nosuch"])
async def test_w_err_2_unknown_route(app: App, path: str) -> None:
    """404; files and batches are not there yet."""
    answer = await call(app, "GET", path)
    assert (answer.status, answer.error["type"], answer.error["code"]) == (404, "invalid_request_error", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_w_err_2_deadline(app: App, server: FakeServer, stream: bool) -> None:
    """timeout_s has passed: 408, not to be sent again."""
    server.held = True
    for path, body in BOTH:
        answer = await post(app, path, body | {"timeout_s": 0.01, "stream": stream})
        assert answer.status == 408
        assert answer.headers["x-should-retry"] == "false"
        error = answer.error
        assert (error["type"], error["param"], error["code"]) == ("timeout_error", None, "request_timeout")


async def test_w_err_3_never_422(app: App) -> None:
    """What does not validate is a 400, on every endpoint that validates."""
    for path in POSTS:
        for body in ({}, {"prompt": 5, "messages": 5, "tokens": 5}, {"nosuch": 1}, 5, "x", [5]):
            assert (await call(app, "POST", path, body)).status == 400


def test_w_err_3_bad_request_error(port: int) -> None:
    """The exception that programs catch, with everything in it."""
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt="x", temperature=3)
    assert (raised.value.code, raised.value.param) == ("decimal_above_max_value", "temperature")
    assert raised.value.type == "invalid_request_error"
    client.close()


async def test_w_err_4_openais_words(app: App) -> None:
    """With an answer that does not fit: how many tokens, of which how many where."""
    error = (await post(app, "chat/completions", CHAT | {"max_tokens": 3000})).error
    assert re.match(
        r"This model's maximum context length is 2048 tokens\. However, you requested \d+ tokens "
        r"\(\d+ in the messages, 3000 in the completion\)",
        error["message"],
    )


async def test_w_err_6_one_error_of_bounded_length(app: App) -> None:
    """However much is wrong and however long the names are: one error is told, in a few hundred characters."""
    secret = "/home/secret/path"
    bodies: list[Any] = [
        TEXT | {f"{secret}{number}": secret for number in range(50)},
        {"prompt": [{secret: secret}] * 50},
        TEXT | {"n": "x" * 10_000, "temperature": "y", "stop": 5, "seed": 1.5},
        TEXT | {"logit_bias": {"z" * 10_000: 1}},
        TEXT | {"stop": ["w" * 10_000] * 50},
        {"prompt": "x", "model": "m" * 10_000},
    ]
    for body in bodies:
        message = (await post(app, "completions", body)).error["message"]
        assert len(message) < 500
        assert "0x" not in message
        assert "Traceback" not in message
        assert ".py" not in message


async def test_w_err_7_no_error_key_in_chunks(app: App) -> None:
    """Clients take any truthy `error` for a failure."""
    for path, body in BOTH:
        events = (await post(app, path, body | {"stream": True, "logprobs": True if "chat" in path else 1})).events
        assert all("error" not in event for event in events)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"prompt":"a","n":2,"n":1}', 200),
        (b'{"prompt":"a","n":1,"n":"x"}', 400),
        (b'{"prompt":"a","temperature":NaN}', 400),
        (b'{"prompt":"a","temperature":Infinity}', 400),
        (b'{"prompt":"a","temperature":-Infinity}', 400),
        (b'{"prompt":"a","n":1.0}', 200),
        (b'{"prompt":"a","n":1e0}', 200),
        (b'{"prompt":"a","n":true}', 400),
        (b'{"prompt":"a","n":"1"}', 400),
        (b'{"prompt":"a","temperature":"0.5"}', 400),
        (b'{"prompt":"a","temperature":false}', 400),
        (b'{"prompt":[true]}', 400),
        (b'{"prompt":["1"],"seed":"5"}', 400),
        (b'{"prompt":"a","temperature":1}', 200),
    ],
)
async def test_w_err_8_json_to_the_letter(app: App, server: FakeServer, body: bytes, status: int) -> None:
    """The last of equal keys counts, NaN and Infinity are no JSON, 1.0 is an integer, true and "1" are not."""
    assert (await post(app, "completions", body)).status == status
    assert [request.n for request in server.requests] == ([1] if status == 200 else [])


async def test_w_err_10_before_it_is_tokenized(app: App, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with a field is said before any text is looked at."""
    from toka.text.tokenizer import Tokenizer

    def encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    wrongs: list[dict[str, Any]] = [{"n": 0}, {"temperature": 9}, {"model": "none"}, {"stream_options": {}}]
    wrongs += [{"stop": ""}, {"nosuch": 1}, {"stream": True, "n": 10**6}]
    for wrong in wrongs:
        for path, body in BOTH:
            assert (await post(app, path, body | wrong)).status in (400, 404)
    assert server.requests == []


async def test_w_http_9_is_an_error_object(app: App) -> None:
    """415 tells which header to send."""
    answer = await post(app, "completions", TEXT, headers={"content-type": "text/plain"})
    assert (answer.status, answer.error["type"]) == (415, "invalid_request_error")
    assert "application/json" in answer.error["message"]


async def test_w_http_10_too_large(make: Callable[..., App]) -> None:
    """413, with the option's value in the message."""
    answer = await post(make(max_body_bytes=1000), "chat/completions", {"messages": "x" * 1001})
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    assert "1000 bytes" in answer.error["message"]


async def test_w_ver_1_head(app: App, server: FakeServer) -> None:
    """HEAD has the same status and no body, ready or not."""
    for ready, status in ((True, 200), (False, 503)):
        server.ready = ready
        for path in ("/health", "/ready"):
            answer = await call(app, "HEAD", path)
            assert (answer.status, answer.content) == (status, b"")
    assert (await call(app, "HEAD", "/version")).status == 200
