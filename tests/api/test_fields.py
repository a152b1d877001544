"""W-CHAT-11 to 15: the fields that say how to sample and when to end, on both endpoints."""

import asyncio
import struct
from typing import Any

import pytest

from tests.api.fakes import FakeServer, post
from toka.api.app import App
from toka.core.sequence import BATCH
from toka.request import MAX_PRIORITY, Request, Sampling

BOTH: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Hi"},
    "chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}


async def served(app: App, server: FakeServer, **fields: object) -> Request:
    """The request that the engine gets; the same from both endpoints."""
    for path, body in BOTH.items():
        answer = await post(app, path, body | fields)
        assert answer.status == 200, answer.content
    one, other = server.requests[-2:]
    assert (one.sampling, one.stop_ids, one.priority) == (other.sampling, other.stop_ids, other.priority)
    return one


async def refused(app: App, server: FakeServer, **fields: object) -> dict[str, Any]:
    """The error of a refusal, the same from both endpoints."""
    errors = []
    for path, body in BOTH.items():
        answer = await post(app, path, body | fields)
        assert answer.status == 400, answer.content
        errors.append(answer.error)
    assert errors[0] == errors[1]
    assert server.requests == []
    return errors[0]


async def test_w_chat_11_penalties(app: App, server: FakeServer) -> None:
    """min_p and the three penalties reach the sampler."""
    request = await served(
        app, server, min_p=0.1, repetition_penalty=1.5, presence_penalty=-2, frequency_penalty=2, temperature=0.5
    )
    assert request.sampling == Sampling(
        temperature=0.5, min_p=0.1, repetition_penalty=1.5, presence_penalty=-2, frequency_penalty=2
    )


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("min_p", 1.1, "decimal_above_max_value"),
        ("min_p", -0.1, "decimal_below_min_value"),
        ("repetition_penalty", 0, "decimal_below_min_value"),
        ("presence_penalty", 2.1, "decimal_above_max_value"),
        ("frequency_penalty", -2.1, "decimal_below_min_value"),
        ("min_tokens", -1, "integer_below_min_value"),
        ("min_tokens", 2**40, "integer_above_max_value"),
        ("priority", 2**20, "integer_above_max_value"),
        ("priority", -(2**31) - 1, "integer_below_min_value"),
        ("logprobs_format", "arrays", "invalid_value"),
        ("logprobs_format", "packed", "invalid_value"),
        ("timeout_s", 0, "decimal_below_min_value"),
        ("cache_salt", "", "empty_string"),
        ("stop_token_ids", ["x"], "invalid_type"),
        ("stop_token_ids", list(range(1025)), "array_above_max_length"),
        ("allowed_token_ids", [], "empty_array"),
        ("include_stop_str_in_output", 1, "invalid_type"),
        ("return_token_ids", "yes", "invalid_type"),
        ("prompt_logprobs", -1, "integer_below_min_value"),
        ("prompt_logprobs", 21, "integer_above_max_value"),
    ],
)
async def test_ranges(app: App, server: FakeServer, field: str, value: object, code: str) -> None:
    """What is out of range is named."""
    error = await refused(app, server, **{field: value})
    assert (error["param"].partition("[")[0], error["code"]) == (field, code)


async def test_w_chat_13_logit_bias(app: App, server: FakeServer) -> None:
    """Ids and floats, little-endian."""
    sampling = (await served(app, server, logit_bias={"5": -100, "258": 1.5})).sampling
    assert sampling.bias_ids == struct.pack("<2i", 5, 258)
    assert sampling.bias == struct.pack("<2f", -100, 1.5)


@pytest.mark.parametrize(
    ("bias", "param", "code"),
    [
        ({"259": 1}, "logit_bias", "invalid_value"),
        ({"9" * 30: 1}, "logit_bias", "invalid_value"),
        ({"-1": 1}, "logit_bias", "invalid_value"),
        ({"the": 1}, "logit_bias", "invalid_value"),
        ({"5": 100.5}, "logit_bias.5", "decimal_above_max_value"),
        ({"5": -101}, "logit_bias.5", "decimal_below_min_value"),
        ({"5": "1"}, "logit_bias.5", "invalid_type"),
        ({"5": True}, "logit_bias.5", "invalid_type"),
        ([5], "logit_bias", "invalid_type"),
        ({str(i): 0 for i in range(1025)}, "logit_bias", "object_above_max_length"),
    ],
)
async def test_w_chat_13_logit_bias_is_checked(
    app: App, server: FakeServer, bias: object, param: str, code: str
) -> None:
    """Keys are ids of the vocabulary, values from -100 to 100."""
    error = await refused(app, server, logit_bias=bias)
    assert (error["param"], error["code"]) == (param, code)


async def test_w_chat_15_ends(app: App, server: FakeServer) -> None:
    """min_tokens, stop_token_ids, include_stop_str_in_output; the engine adds what may not be sampled before."""
    request = await served(app, server, min_tokens=3, stop_token_ids=[5, 7, 5], include_stop_str_in_output=True)
    assert (request.sampling.min_tokens, request.sampling.blocked) == (3, b"")
    assert (request.stop_ids, request.include_stop) == ((5, 7), True)


async def test_w_chat_15_min_tokens_above_the_cap(app: App, server: FakeServer) -> None:
    """More than max_tokens cannot be."""
    assert (await refused(app, server, min_tokens=3, max_tokens=2))["param"] == "min_tokens"


async def test_b08_stop_token_ids_in_range(app: App, server: FakeServer) -> None:
    """An id that no token has never reaches the engine."""
    for id in (10**9, -1, 259):
        assert (await refused(app, server, stop_token_ids=[5, id]))["param"] == "stop_token_ids[1]"
        assert (await refused(app, server, allowed_token_ids=[id]))["param"] == "allowed_token_ids[0]"


async def test_allowed_token_ids(app: App, server: FakeServer) -> None:
    """Each once."""
    assert (await served(app, server, allowed_token_ids=[7, 5, 7])).sampling.allowed == struct.pack("<2i", 5, 7)


async def test_priority_stays_out_of_the_batch_lane(app: App, server: FakeServer) -> None:
    """The largest number that a client may give still counts as somebody who waits."""
    assert (await served(app, server, priority=2**20 - 1)).priority == MAX_PRIORITY == BATCH - 1
    error = (await post(app, "completions", BOTH["completions"] | {"priority": BATCH})).error
    assert (error["param"], error["code"]) == ("priority", "integer_above_max_value")


async def test_cache_salt_and_priority(app: App, server: FakeServer) -> None:
    """They reach the engine."""
    request = await served(app, server, cache_salt="tenant", priority=-3)
    assert (request.cache_salt, request.priority) == ("tenant", -3)


async def test_timeout_s(app: App, server: FakeServer) -> None:
    """408 after the client's own deadline, streamed or not, and the work is given back."""
    server.held = True
    for path, body in BOTH.items():
        for stream in (False, True):
            answer = await asyncio.wait_for(post(app, path, body | {"timeout_s": 0.01, "stream": stream}), 5)
            assert answer.status == 408
            assert answer.headers["x-should-retry"] == "false"
            assert (answer.error["type"], answer.error["code"]) == ("timeout_error", "request_timeout")
    assert server.running == {}
    assert len(server.cancelled) == 4


async def test_timeout_s_long_enough(app: App, server: FakeServer) -> None:
    """No deadline that is not reached, however far."""
    await served(app, server, timeout_s=1e300)


@pytest.mark.parametrize("stream", [False, True])
async def test_w_chat_8_greedy_choices_are_copied(app: App, server: FakeServer, stream: bool) -> None:
    """n > 1 at temperature 0 is computed once; usage counts n times."""
    server.script = lambda request, index: [str(index), "x"]
    body = {"prompt": ["a", "b"], "n": 3, "temperature": 0, "stream": stream}
    if stream:
        answer = await post(app, "completions", body | {"stream_options": {"include_usage": True}})
        texts = [""] * 6
        for choice in (choice for event in answer.events for choice in event["choices"]):
            texts[choice["index"]] += choice["text"]
        usage = answer.events[-1]["usage"]
    else:
        answer = await post(app, "completions", body)
        texts, usage = [choice["text"] for choice in answer.json["choices"]], answer.json["usage"]
    assert texts == ["0x"] * 3 + ["1x"] * 3
    assert usage["completion_tokens"] == 12
    assert usage["prompt_tokens"] == 2
    assert server.requests[0].n == 1


async def test_return_token_ids(app: App, server: FakeServer) -> None:
    """Token ids of the choice and of the prompt; nothing unless asked for."""
    server.script = lambda request, index: ["a", "b"]
    text, chat = [(await post(app, path, body | {"return_token_ids": True})).json for path, body in BOTH.items()]
    assert text["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"] == [97, 98]
    assert text["choices"][0]["prompt_token_ids"] == [72, 105]
    assert chat["prompt_token_ids"] == server.requests[1].prompts[0]
    plain = (await post(app, "completions", BOTH["completions"])).json["choices"][0]
    assert "token_ids" not in plain
    assert "prompt_token_ids" not in plain


@pytest.mark.parametrize("path", list(BOTH))
async def test_return_token_ids_streamed(app: App, server: FakeServer, path: str) -> None:
    """The chunks' ids joined; the prompt's once."""
    server.script = lambda request, index: ["a", "b", ""]
    events = (await post(app, path, BOTH[path] | {"return_token_ids": True, "stream": True})).events
    assert [id for e in events for id in e["choices"][0].get("token_ids", [])] == [97, 98, 256]
    prompts = [ids for e in events if (ids := e.get("prompt_token_ids") or e["choices"][0].get("prompt_token_ids"))]
    assert prompts == server.requests[0].prompts
