"""W-CHAT: chat completions, from messages to the request and from deltas to the answer."""

import re
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.api.fakes import FakeServer, chat
from toka.api.app import App, create_app
from toka.config import Config
from toka.errors import BadRequest
from toka.request import Sampling


async def test_w_chat_1_whole(app: App, server: FakeServer) -> None:
    """Every field of an answer."""
    server.cached_tokens = 3
    body = (await chat(app, model="org/alias")).json
    assert re.fullmatch(r"chatcmpl-[0-9a-f]+", body.pop("id"))
    assert abs(body.pop("created") - time.time()) < 5
    assert body.pop("system_fingerprint").startswith("fp_")
    assert body == {
        "object": "chat.completion",
        "model": "org/alias",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            **{"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13},
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


async def test_w_chat_1_choices_by_index(app: App, server: FakeServer) -> None:
    """Choices are in order of their index, not of their end."""
    server.script = lambda request, index: ["x"] * (5 - index)
    body = (await chat(app, n=5)).json
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4]
    assert [len(choice["message"]["content"]) for choice in body["choices"]] == [5, 4, 3, 2, 1]


async def test_w_chat_2_message(app: App) -> None:
    """Role, content and refusal; no tool_calls, not even an empty list, streamed or not."""
    assert (await chat(app)).json["choices"][0]["message"] == {
        **{"role": "assistant", "content": "Hello, world!", "refusal": None}
    }
    assert b"tool_calls" not in (await chat(app, stream=True)).content


async def test_w_chat_3_no_logprobs(app: App) -> None:
    """null, and the key is there, streamed or not."""
    events = (await chat(app, stream=True)).events
    for choice in [*(await chat(app)).json["choices"], *(event["choices"][0] for event in events)]:
        assert choice["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_w_chat_7_usage(app: App, server: FakeServer, stream: bool) -> None:
    """The prompt is counted once, the choices all; the total is the sum; cached tokens are always told."""
    server.script = lambda request, index: ["x"] * (5 - index)
    for cached in (0, 3):
        server.cached_tokens = cached
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await chat(app, n=5, **options)
        assert (answer.events[-1] if stream else answer.json)["usage"] == {
            **{"prompt_tokens": 9, "completion_tokens": 15, "total_tokens": 24},
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def test_w_chat_4_finish_reasons(app: App, server: FakeServer) -> None:
    """`length` at the cap; `stop` otherwise, with the stop string that ended it."""
    assert (await chat(app, max_tokens=2)).json["choices"][0]["finish_reason"] == "length"
    server.stop_reason = "END"
    choice = (await chat(app, stop="END")).json["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")
    assert server.requests[-1].stop == ("END",)


async def test_w_chat_8_n(app: App, server: FakeServer) -> None:
    """n is the engine's business, in one request, from 1 to max_n."""
    assert len((await chat(app, n=128)).json["choices"]) == 128
    assert server.requests[0].n == 128
    for n, code in ((129, "integer_above_max_value"), (0, "integer_below_min_value")):
        error = (await chat(app, n=n)).error
        assert (error["param"], error["code"]) == ("n", code)


async def test_w_chat_8_streams_interleave(app: App, server: FakeServer) -> None:
    """Choices of a stream come as they are made, told apart by their index."""
    server.script = lambda request, index: [f"{index}a", f"{index}b"]
    choices = [event["choices"][0] for event in (await chat(app, n=2, stream=True)).events]
    texts = [(one["index"], one["delta"]["content"]) for one in choices if one["delta"].get("content")]
    assert texts == [(0, "0a"), (1, "1a"), (0, "0b"), (1, "1b")]


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
    ],
)
async def test_w_chat_9_max_tokens(app: App, server: FakeServer, fields: dict[str, Any], limit: int | None) -> None:
    """Either name, the newer one wins, neither means the rest of the context."""
    assert (await chat(app, **fields)).status == 200
    assert server.requests[0].max_tokens == limit


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_w_chat_9_zero(app: App, name: str) -> None:
    """A chat of no tokens is refused."""
    zero: dict[str, Any] = {name: 0}
    error = (await chat(app, **zero)).error
    assert (error["param"], error["code"]) == (name, "integer_below_min_value")


async def test_w_chat_10_sampling_defaults(app: App, server: FakeServer) -> None:
    """OpenAI's, unless the server has others; what the client says always wins."""
    await chat(app)
    assert server.requests[0].sampling == Sampling(temperature=1.0, top_p=1.0, top_k=0)
    assert server.requests[0].seed is None
    await chat(app, temperature=0.5, top_p=0.9, top_k=40, seed=7)
    assert server.requests[1].sampling == Sampling(temperature=0.5, top_p=0.9, top_k=40)
    assert server.requests[1].seed == 7
    service = app._router.routes[0].endpoint.service  # type: ignore[attr-defined]
    defaults = Sampling(temperature=0.6, top_k=20)
    other = create_app(Config(), server, service.tokenizer, service.template, ["tiny"], 0, defaults)
    await chat(other, top_p=0.5)
    assert server.requests[2].sampling == Sampling(temperature=0.6, top_p=0.5, top_k=20)
    await chat(other, temperature=0, top_k=0)
    assert server.requests[3].sampling == Sampling(temperature=0.0, top_k=0)


@pytest.mark.parametrize("temperature", [0, 1e-30, 9e-6])
async def test_w_chat_10_tiny_temperatures_are_greedy(app: App, server: FakeServer, temperature: float) -> None:
    """Below 1e-5 a temperature is 0."""
    await chat(app, temperature=temperature)
    assert server.requests[0].sampling.temperature == 0.0


@pytest.mark.parametrize(("asked", "top_k"), [(-1, 0), (0, 0), (1, 1), (2**63, 2**31 - 1)])
async def test_w_chat_11_top_k(app: App, server: FakeServer, asked: int, top_k: int) -> None:
    """-1 and 0 are off; more than any vocabulary stays in 32 bits."""
    await chat(app, top_k=asked)
    assert server.requests[0].sampling.top_k == top_k


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
async def test_w_chat_12_seed(app: App, server: FakeServer, seed: int) -> None:
    """Any int64."""
    assert (await chat(app, seed=seed)).status == 200
    assert server.requests[0].seed == seed


@pytest.mark.parametrize(
    ("stop", "strings"), [("a", ("a",)), (["a", "b"], ("a", "b")), ([], ()), (["x"] * 16, ("x",) * 16)]
)
async def test_w_chat_14_stop(app: App, server: FakeServer, stop: object, strings: tuple[str, ...]) -> None:
    """A string or a list of up to 16."""
    assert (await chat(app, stop=stop)).status == 200
    assert server.requests[0].stop == strings


async def test_w_chat_15_ignore_eos(app: App, server: FakeServer) -> None:
    """It reaches the engine."""
    await chat(app, ignore_eos=True)
    await chat(app)
    assert [request.ignore_eos for request in server.requests] == [True, False]


async def test_failure_while_generating(app: App, server: FakeServer) -> None:
    """A request that is not streamed gets the engine's error as its status."""
    server.failure, server.break_at = BadRequest("the worker is gone"), 2
    answer = await chat(app)
    assert answer.status == 400
    assert answer.error["message"] == "the worker is gone"


async def test_w_chat_16_extensions_are_at_the_top(app: App, server: FakeServer) -> None:
    """Where the OpenAI client's extra_body puts them; the literal key is refused with an explanation."""
    assert (await chat(app, top_k=7, ignore_eos=True, min_p=0.5)).status == 200
    assert server.requests[0].sampling.top_k == 7
    error = (await chat(app, extra_body={"top_k": 7})).error
    assert (error["param"], error["code"]) == ("extra_body", "unknown_parameter")
    assert "top level" in error["message"]


IGNORED: list[tuple[str, object]] = [
    *(("user", "u"), ("metadata", {"a": "b"}), ("store", False), ("store", True), ("service_tier", "auto")),
    *(("safety_identifier", "x"), ("prompt_cache_key", "x"), ("prompt_cache_retention", "24h")),
    *(("prompt_cache_options", {"x": 1}), ("parallel_tool_calls", True), ("verbosity", "low"), ("moderation", None)),
    *(("modalities", ["text"]), ("function_call", "none"), ("functions", [])),
]


@pytest.mark.parametrize(("field", "value"), IGNORED, ids=str)
async def test_w_chat_23_ignored(app: App, server: FakeServer, field: str, value: object) -> None:
    """Accepted, and the engine hears the same as without it."""
    assert (await chat(app, **{field: value})).status == (await chat(app)).status == 200
    one, other = server.requests
    assert replace(one, id="") == replace(other, id="")


async def test_w_chat_23_ignored_in_a_stream(app: App) -> None:
    """include_obfuscation is for services that hide lengths."""
    for wanted in (True, False):
        answer = await chat(app, stream=True, stream_options={"include_obfuscation": wanted})
        assert "obfuscation" not in answer.events[1]


REJECTED: list[tuple[str, object]] = [
    *(("audio", {"voice": "x"}), ("modalities", ["text", "audio"]), ("web_search_options", {})),
    *(("prediction", {"type": "content", "content": "x"}), ("functions", [{"name": "f"}]), ("moderation", {"x": 1})),
    ("function_call", "auto"),
]


@pytest.mark.parametrize(("field", "value"), REJECTED, ids=str)
async def test_w_chat_23_rejected(app: App, server: FakeServer, field: str, value: object) -> None:
    """What would change the answer, and is not served, is refused by name."""
    answer = await chat(app, **{field: value})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, field, "unsupported_parameter")
    assert server.requests == []
