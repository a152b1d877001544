"""W-ERR: what a wrong request is told. Nothing of it reaches the engine."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.fakes import Answer, FakeServer, call, post
from toka.api.app import App
from toka.api.limits import MAX_CHOICES
from toka.errors import EngineFault, Unavailable
from toka.text.tokenizer import Tokenizer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"prompt": "Hi"}


async def refused(app: App, path: str, body: object, status: int = 400) -> dict[str, Any]:
    """The error object of a refusal."""
    answer = await post(app, path, body)
    assert answer.status == status, answer.content
    assert answer.headers["content-type"] == "application/json"
    return answer.error


@pytest.fixture(autouse=True)
def nothing_submitted(server: FakeServer, request: pytest.FixtureRequest) -> Any:
    """W-ERR-10: a request that is refused with 400 never reached the engine."""
    yield
    if "served" not in request.node.name:
        assert server.requests == []


BROKEN = [
    *(b"", b"  \n", b"{", b'{"prompt":"x",}', b'{"prompt":"x"} x', b"{'prompt':1}", b"<html>", b"\xff\xfe"),
    *(b'{"prompt":"a\x01b"}', b'{"prompt":NaN}', b'{"temperature":Infinity}', b'{"prompt":"\xc4\xe3"}'),
    *(b'{"prompt":"a\\ud800b"}', b'{"user":"\\udc97"}', b'{"n":1e999}', b'{"n":1' + b"0" * 5000 + b"}"),
    *(b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt":"x"}{"prompt":"x"}'),
]


@pytest.mark.parametrize("body", BROKEN, ids=lambda body: body[:20].decode("latin1"))
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_w_err_2_invalid_json(app: App, path: str, body: bytes) -> None:
    """What cannot be parsed is a 400 in OpenAI's words, whatever is wrong with it."""
    error = await refused(app, path, body)
    assert error["message"].startswith("We could not parse the JSON body of your request")
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, None)


async def test_w_err_2_invalid_json_says_where(app: App) -> None:
    """The message holds the position."""
    assert "byte 14" in (await refused(app, "completions", b'{"prompt":"x",}'))["message"]
    assert "surrogate" in (await refused(app, "completions", b'{"prompt":"\\ud800"}'))["message"]


@pytest.mark.parametrize("body", [b"[]", b"null", b"1", b'"x"', b"true", b'[{"prompt":"x"}]'])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_w_err_2_body_is_no_object(app: App, path: str, body: bytes) -> None:
    """A body that is JSON and no object."""
    error = await refused(app, path, body)
    assert (error["param"], error["code"]) == (None, None)
    assert "expected an object" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {}, "prompt"),
        ("completions", {"prompt": None}, "prompt"),
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": None}, "messages"),
        ("chat/completions", {"messages": [{}]}, "messages[0].role"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
    ],
)
async def test_w_err_2_missing_required(app: App, path: str, body: object, param: str) -> None:
    """A required field that is absent or null is named."""
    error = await refused(app, path, body)
    assert error["message"] == f"Missing required parameter: '{param}'."
    assert (error["param"], error["code"]) == (param, "missing_required_parameter")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", "two", "Invalid type for 'n': expected an integer, but got a string instead."),
        ("n", "1", "Invalid type for 'n': expected an integer, but got a string instead."),
        ("n", 1.5, "Invalid type for 'n': expected an integer, but got a decimal number instead."),
        ("n", True, "Invalid type for 'n': expected an integer, but got a boolean instead."),
        ("max_tokens", "many", None),
        ("max_tokens", [1], None),
        ("temperature", "hot", "Invalid type for 'temperature': expected a number, but got a string instead."),
        ("temperature", True, None),
        ("top_k", "five", None),
        ("seed", 1.5, None),
        ("seed", "1", None),
        ("stop", 5, "Invalid type for 'stop': expected a string or an array, but got an integer instead."),
        ("stop", {"a": 1}, None),
        ("stream", "yes", None),
        ("stream", 1, "Invalid type for 'stream': expected a boolean, but got an integer instead."),
        ("model", 5, None),
        ("ignore_eos", 1, None),
    ],
)
async def test_w_err_2_wrong_type(app: App, field: str, value: object, message: str | None) -> None:
    """The type expected and the type given."""
    for path, body in (("completions", TEXT), ("chat/completions", CHAT)):
        error = await refused(app, path, body | {field: value})
        assert (error["param"], error["code"]) == (field, "invalid_type")
        assert message is None or error["message"] == message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": "hi"}, "messages"),
        ("chat/completions", {"messages": [None]}, "messages[0]"),
        ("chat/completions", {"messages": [[{"role": "user"}]]}, "messages[0]"),
        ("chat/completions", {"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("chat/completions", {"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
        ("completions", {"prompt": 5}, "prompt"),
        ("completions", {"prompt": {"a": 1}}, "prompt"),
        ("completions", {"prompt": [1.5]}, "prompt[0]"),
        ("completions", {"prompt": [None]}, "prompt[0]"),
        ("completions", {"prompt": [1, "a"]}, "prompt[1]"),
        ("completions", {"prompt": ["a", [1]]}, "prompt[1]"),
        ("completions", {"prompt": [[1], 2]}, "prompt[1]"),
        ("completions", {"prompt": [[[5]]]}, "prompt[0][0]"),
        ("completions", {"prompt": [True]}, "prompt[0]"),
        (
            "completions",
            TEXT | {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
        ),
    ],
)
async def test_w_err_2_wrong_type_inside(app: App, path: str, body: object, param: str) -> None:
    """The path leads to the place."""
    error = await refused(app, path, body)
    assert (error["param"], error["code"]) == (param, "invalid_type")


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("n", 0, "integer_below_min_value"),
        ("n", -1, "integer_below_min_value"),
        ("n", 129, "integer_above_max_value"),
        ("n", 10**30, "integer_above_max_value"),
        ("max_tokens", -1, "integer_below_min_value"),
        ("max_tokens", -(10**9), "integer_below_min_value"),
        ("temperature", -0.1, "decimal_below_min_value"),
        ("temperature", 2.1, "decimal_above_max_value"),
        ("temperature", 1e30, "decimal_above_max_value"),
        ("top_p", 0, "decimal_below_min_value"),
        ("top_p", 1.01, "decimal_above_max_value"),
        ("top_k", -2, "integer_below_min_value"),
        ("seed", 2**63, "integer_above_max_value"),
        ("seed", 2**64, "integer_above_max_value"),
        ("seed", -(2**63) - 1, "integer_below_min_value"),
        ("seed", 10**30, "integer_above_max_value"),
    ],
)
async def test_w_err_2_out_of_range(app: App, field: str, value: float, code: str) -> None:
    """The bound, and whether it is one of integers or of decimals."""
    for path, body in (("completions", TEXT), ("chat/completions", CHAT)):
        error = await refused(app, path, body | {field: value})
        assert (error["param"], error["code"]) == (field, code)
        assert f"but got {value} instead" in error["message"]


async def test_w_err_2_out_of_range_in_words(app: App) -> None:
    """OpenAI's sentence."""
    error = await refused(app, "completions", TEXT | {"n": 0})
    assert error["message"] == "Invalid 'n': integer below minimum value. Expected a value >= 1, but got 0 instead."


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("completions", TEXT | {"stop": ["x"] * 17}, "stop", "array_above_max_length"),
        ("completions", TEXT | {"stop": "x" * 1025}, "stop", "string_above_max_length"),
        ("completions", TEXT | {"stop": ["a", "x" * 1025]}, "stop[1]", "string_above_max_length"),
        ("completions", TEXT | {"stop": ""}, "stop", "empty_string"),
        ("completions", TEXT | {"stop": ["a", ""]}, "stop[1]", "empty_string"),
        ("completions", {"prompt": []}, "prompt", "empty_array"),
        ("completions", {"prompt": [[]]}, "prompt[0]", "empty_array"),
        ("completions", {"prompt": [[1], []]}, "prompt[1]", "empty_array"),
        ("chat/completions", {"messages": []}, "messages", "empty_array"),
    ],
)
async def test_w_err_2_lengths(app: App, path: str, body: object, param: str, code: str) -> None:
    """What is too long, and what may not be empty."""
    error = await refused(app, path, body)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("top-k", "Did you mean 'top_k'?"),
        ("topP", "Did you mean 'top_p'?"),
        ("max_token", "Did you mean 'max_tokens'?"),
        ("frobnicate", ""),
        ("extra_body", "top level"),
    ],
)
async def test_w_err_2_unknown_field(app: App, name: str, hint: str) -> None:
    """A field that nobody knows is named, with the one that was meant. W-CHAT-16: extra_body is explained."""
    error = await refused(app, "chat/completions", CHAT | {name: {}})
    assert error["message"].startswith(f"Unknown parameter: '{name}'.")
    assert hint in error["message"]
    assert (error["param"], error["code"]) == (name, "unknown_parameter")


async def test_w_err_2_unknown_field_of_the_other_path(app: App) -> None:
    """A field of the other endpoint is said to belong there."""
    assert "/v1/completions" in (await refused(app, "chat/completions", CHAT | {"prompt": "x"}))["message"]
    assert "/v1/chat/completions" in (await refused(app, "completions", TEXT | {"messages": []}))["message"]


async def test_w_err_2_unknown_field_inside(app: App) -> None:
    """stream_options takes no other fields."""
    error = await refused(app, "completions", TEXT | {"stream": True, "stream_options": {"usage": True}})
    assert (error["param"], error["code"]) == ("stream_options.usage", "unknown_parameter")


async def test_w_err_2_unknown_model(app: App) -> None:
    """404, with the names that are served."""
    error = await refused(app, "completions", TEXT | {"model": "gpt-5"}, 404)
    assert error["message"] == "The model `gpt-5` does not exist. Available: tiny, org/alias."
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", "model_not_found")


async def test_w_err_2_body_too_large(make: Callable[..., App]) -> None:
    """413, whether the length is declared or the body comes in chunks."""
    app = make(max_body_bytes=1024)
    body = b'{"prompt":"' + b"x" * 1024 + b'"}'
    length = {"content-length": str(len(body))}
    answers = [
        await post(app, "completions", b"", headers=length),
        await post(app, "completions", None, parts=[body[:600], body[600:]]),
    ]
    for answer in answers:
        assert answer.status == 413
        assert answer.error["code"] == "request_too_large"


async def test_w_err_2_engine_fault(app: App, server: FakeServer) -> None:
    """500 that is not to be tried again. Served: the engine took it."""
    server.refusal = EngineFault("the sampler returned no token")
    answer = await post(app, "completions", TEXT)
    assert answer.status == 500
    assert answer.headers["x-should-retry"] == "false"
    assert (answer.error["type"], answer.error["code"]) == ("server_error", "engine_error")


async def test_w_err_2_not_ready(app: App, server: FakeServer) -> None:
    """503 with retry-after while the context length is unknown, and when the engine says so."""
    server.max_model_len = 0
    loading = await post(app, "completions", TEXT)
    server.max_model_len = 2048
    server.refusal = Unavailable("The server is shutting down.", code="draining")
    draining = await post(app, "chat/completions", CHAT | {"stream": True})
    for answer, code in ((loading, "not_ready"), (draining, "draining")):
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        assert (answer.error["type"], answer.error["code"]) == ("server_error", code)


async def test_w_err_2_unexpected(app: App, server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """What nobody expected is a 500 without a traceback; the log has it, under the request id."""

    def submit(*_: object) -> None:
        raise ZeroDivisionError("secret /path")

    server.submit = submit  # type: ignore[assignment, method-assign]
    with caplog.at_level(logging.ERROR, "toka.api"):
        answer = await post(app, "completions", TEXT, headers={"x-request-id": "abc-1"})
    assert answer.status == 500
    assert answer.error["code"] == "engine_error"
    assert "secret" not in answer.content.decode()
    assert "abc-1" in answer.error["message"]
    assert "abc-1" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_w_err_4_prompt_too_long(app: App) -> None:
    """A prompt that does not fit is refused in the words that clients look for, and never cut."""
    error = await refused(app, "completions", {"prompt": [5] * 2048})
    assert error["message"].startswith("This model's maximum context length is 2048 tokens. However, your prompt")
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    error = await refused(app, "chat/completions", {"messages": [{"role": "user", "content": "x" * 3000}]})
    assert "maximum context length is 2048 tokens" in error["message"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


async def test_w_err_4_far_too_long_is_seen_before_tokenizing(
    app: App, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a text has more characters than any tokens that fit can stand for, nothing is tokenized."""

    def encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    text = "x" * (2048 * len("<|endoftext|>") + 1)
    assert tokenizer.fewest(text) == 2049
    error = await refused(app, "completions", {"prompt": ["a", text]})
    assert error["message"].startswith(
        "This model's maximum context length is 2048 tokens. However, your prompt resulted in at"
    )
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    error = await refused(app, "chat/completions", {"messages": [{"role": "user", "content": text}]})
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


async def test_a_request_has_only_so_many_choices(app: App, server: FakeServer) -> None:
    """Each is a sequence to be set up while everybody else waits: prompts and samples have one bound together."""
    for prompts, n in ((MAX_CHOICES + 1, 1), (MAX_CHOICES // 128 + 1, 128)):
        error = await refused(app, "completions", {"prompt": [[1]] * prompts, "n": n})
        assert (error["param"], error["code"]) == ("prompt", "array_above_max_length")
        assert str(MAX_CHOICES // n) in error["message"]
    answer = await post(app, "completions", {"prompt": [[1]] * (MAX_CHOICES // 128), "n": 128, "max_tokens": 0})
    assert answer.status == 200


async def test_samples_that_are_not_kept_count_as_choices(app: App, server: FakeServer) -> None:
    """With best_of the engine sets up best_of sequences for each prompt, however few of them the client gets."""
    error = await refused(app, "completions", {"prompt": [[1]] * (MAX_CHOICES // 128 + 1), "best_of": 128})
    assert (error["param"], error["code"]) == ("prompt", "array_above_max_length")
    assert error["message"].endswith(f"{MAX_CHOICES // 128} prompts with best_of = 128.")
    body = {"prompt": [[1]] * (MAX_CHOICES // 128), "best_of": 128, "max_tokens": 0}
    assert (await post(app, "completions", body)).status == 200


@pytest.mark.parametrize("asked", [2047, 10**9, 2**63, 10**30])
async def test_w_err_5_max_tokens_too_large(app: App, asked: int) -> None:
    """A prompt that fits, with an answer that does not: the largest legal value is in the message."""
    error = await refused(app, "completions", TEXT | {"max_tokens": asked})
    assert error["message"] == (
        f"This model's maximum context length is 2048 tokens. However, you requested {asked + 2} tokens "
        f"(2 in the prompt, {asked} in the completion). Use max_tokens ≤ 2046."
    )
    assert error["code"] == "context_length_exceeded"
    error = await refused(app, "chat/completions", CHAT | {"max_completion_tokens": asked})
    assert "in the messages" in error["message"]
    assert "Use max_completion_tokens ≤" in error["message"]


@pytest.mark.parametrize("digits", [42, 300, 4300])
async def test_w_err_6_numbers_of_any_length(app: App, digits: int) -> None:
    """A number too long to be repeated is refused as any that is too large, in a message of the usual length. (4,300
    digits are the most that Python spells; the sum in the message would have one more.)"""
    asked = int("9" * digits)
    error = await refused(app, "completions", TEXT | {"max_tokens": asked})
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == (
        "This model's maximum context length is 2048 tokens. However, you requested more than 10^40 tokens "
        "(2 in the prompt, more than 10^40 in the completion). Use max_tokens ≤ 2046."
    )
    for value, got in ((asked, "more than 10^40"), (-(asked // 10), "less than -10^40")):
        error = await refused(app, "completions", TEXT | {"seed": value})
        assert error["message"].endswith(f", but got {got} instead.")


async def test_w_err_5_clamp_is_served(make: Callable[..., App], server: FakeServer) -> None:
    """With max_tokens_overflow=clamp the engine takes what is left after each prompt."""
    app = make(max_tokens_overflow="clamp")
    for asked in (48, 100, 10**30):
        assert (await post(app, "completions", {"prompt": [[1] * 2000, [1] * 100], "max_tokens": asked})).status == 200
        assert (server.requests[-1].max_tokens, server.requests[-1].clamp) == (asked, True)
    assert (await post(make(), "completions", TEXT | {"max_tokens": 5})).status == 200
    assert not server.requests[-1].clamp


async def test_w_err_6_nothing_of_the_prompt(app: App) -> None:
    """Messages repeat no more than names and numbers, and of those not much."""
    secret = "my secret prompt"
    bodies: list[dict[str, Any]] = [{"prompt": {"a": secret}}, {"prompt": [1, secret]}, TEXT | {"stop": [[secret]]}]
    for body in bodies:
        assert secret not in (await refused(app, "completions", body))["message"]
    assert "\n" not in (await refused(app, "completions", TEXT | {"a\nb": 1}))["message"]
    long = await refused(app, "completions", TEXT | {"x" * 5000: 1})
    assert len(long["message"]) < 300
    long = await refused(app, "completions", TEXT | {"model": "x" * 5000}, 404)
    assert len(long["message"]) < 300


async def test_w_err_8_whole_decimals_are_served(app: App, server: FakeServer) -> None:
    """3.0 is an integer; the last of two equal keys counts."""
    body = b'{"prompt":[1.0,2],"n":2.0,"max_tokens":3.0,"seed":-7.0,"top_k":4.0,"top_k":5}'
    assert (await post(app, "completions", body)).status == 200
    request = server.requests[0]
    assert (request.prompts, request.n, request.max_tokens) == ([[1, 2]], 2, 3)
    assert (request.seed, request.sampling.top_k) == (-7, 5)
    assert all(type(id) is int for id in request.prompts[0])


NULLS = (
    *("model", "n", "stop", "seed", "stream", "stream_options", "temperature", "top_p", "top_k", "max_tokens"),
    *("max_completion_tokens", "logit_bias", "tools", "tool_choice", "top_logprobs", "logprobs", "response_format"),
    *("functions", "function_call", "reasoning_effort", "prediction", "audio", "ignore_eos", "best_of", "user"),
)


async def test_w_err_9_null_is_absent_and_served(app: App, server: FakeServer) -> None:
    """null in every optional field changes nothing."""
    plain = await post(app, "chat/completions", CHAT)
    nulls = await post(app, "chat/completions", CHAT | dict.fromkeys(NULLS))
    assert plain.status == nulls.status == 200
    one, other = server.requests
    assert (one.sampling, one.n, one.max_tokens, one.stop) == (other.sampling, other.n, other.max_tokens, other.stop)


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"model": "none"}, {"max_tokens": -5}, {"prompt": [5] * 9999}])
async def test_w_err_10_before_the_stream(app: App, wrong: dict[str, Any]) -> None:
    """A bad request is refused with a plain status, stream or not."""
    answer = await post(app, "completions", TEXT | {"stream": True} | wrong)
    assert 400 <= answer.status < 500
    assert answer.headers["content-type"] == "application/json"
    assert answer.error["message"]


async def test_no_chat_template(app: App, make: Callable[..., App], server: FakeServer) -> None:
    """A model without a template cannot chat, and says what is missing."""
    from toka.api.app import create_app
    from toka.config import Config

    service = make()._router.routes[0].endpoint.service  # type: ignore[attr-defined]
    without = create_app(Config(), server, service.tokenizer, None, ["tiny"], 0)
    assert "chat template" in (await refused(without, "chat/completions", CHAT))["message"]
    answer: Answer = await call(without, "GET", "/v1/models")
    assert answer.status == 200
