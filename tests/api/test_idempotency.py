"""W-HTTP-4: requests with the same key and the same body are one piece of work, as long as it runs."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.fakes import FakeServer, call
from tests.api.visits import Visit, until
from toka.api.app import App
from toka.api.broadcast import WIDTH, Past
from toka.errors import EngineFault, Unavailable
from toka.request import Delta
from toka.text.tokenizer import Tokenizer

TEXT: dict[str, Any] = {"prompt": "Hi", "max_tokens": 50}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
WAYS = [
    (path, body | {"stream": stream})
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT))
    for stream in (False, True)
]
KEY = {"idempotency-key": "one"}


@pytest.fixture(autouse=True)
def slowly(server: FakeServer) -> None:
    """Answers of twenty words, each a millisecond after the last."""
    server.pause = 0.001
    server.script = lambda request, index: [f"{index}:{step} " for step in range(20)]


def said(visit: Visit) -> str:
    """The text of an answer, however it came."""
    answer = visit.answer
    chunks = answer.events if answer.headers["content-type"].startswith("text/event-stream") else [answer.json]
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(
        part["text"] if "text" in part else part.get("delta", part.get("message")).get("content", "") for part in parts
    )


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_w_http_4_the_second_attaches(app: App, server: FakeServer, path: str, body: dict[str, Any]) -> None:
    """It gets the whole answer of the first from the start, under its own request id, and nothing runs twice."""
    async with Visit(app, path, body, KEY | {"x-request-id": "a"}) as one:
        await until(lambda: server.running and next(iter(server.running.values())).step > 5)
        async with Visit(app, path, body, KEY | {"x-request-id": "b", "x-stainless-retry-count": "1"}) as other:
            await one.ended()
            await other.ended()
    assert len(server.requests) == 1
    assert server.cancelled == []
    assert said(one) == said(other) == "".join(f"0:{step} " for step in range(20))
    assert [one.answer.headers["x-request-id"], other.answer.headers["x-request-id"]] == ["a", "b"]
    if body["stream"]:
        assert {event["id"] for event in one.answer.events + other.answer.events} == {server.requests[0].id}
        assert other.writes < one.writes, "what was missed comes in one piece"
    else:
        assert one.answer.content == other.answer.content


async def test_w_http_4_everything_that_was_asked_for(app: App, server: FakeServer) -> None:
    """Log-probabilities, the prompt and the usage come to each from the start."""
    server.cached_tokens = 1
    body = TEXT | {"stream": True, "logprobs": 1, "echo": True, "return_token_ids": True, "n": 2}
    body |= {"stream_options": {"include_usage": True}}
    async with Visit(app, "/v1/completions", body, KEY) as one:
        await until(lambda: server.running and next(iter(server.running.values())).step > 5)
        async with Visit(app, "/v1/completions", body, KEY) as other:
            seen = [await one.ended(), await other.ended()]
    told = []
    for answer in seen:
        joined: dict[tuple[int, str], list[Any]] = {}
        for choice in (choice for event in answer.events for choice in event["choices"]):
            for name, values in (choice["logprobs"] or {}).items():
                joined.setdefault((choice["index"], name), []).extend(values)
            for name in ("token_ids", "prompt_token_ids"):
                joined.setdefault((choice["index"], name), []).extend(choice.get(name, []))
        told.append((joined, answer.events[-1]["usage"]))
    assert told[0] == told[1]
    assert len(told[0][0][1, "tokens"]) == 22
    assert told[0][1]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_w_http_4_another_body_is_refused(app: App, server: FakeServer) -> None:
    """409, not to be sent again; the first goes on."""
    async with Visit(app, "/v1/completions", TEXT, KEY) as one:
        await until(lambda: server.running)
        answer = await call(app, "POST", "/v1/completions", TEXT | {"seed": 1}, headers=KEY)
        assert answer.status == 409
        assert answer.headers["x-should-retry"] == "false"
        assert (answer.error["type"], answer.error["code"]) == ("invalid_request_error", "idempotency_key_in_use")
        assert (await one.ended()).status == 200
    assert len(server.requests) == 1


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_w_http_4_cancelled_when_all_have_gone(
    app: App, server: FakeServer, path: str, body: dict[str, Any]
) -> None:
    """The first may leave: the others get their answer. When the last one leaves, the work is given back."""
    async with Visit(app, path, body, KEY) as one, Visit(app, path, body, KEY) as other:
        await until(lambda: server.running)
        await one.left()
        assert server.cancelled == []
        assert "0:19" in (await other.ended()).content.decode()
    server.held = True
    async with Visit(app, path, body, KEY) as one, Visit(app, path, body, KEY) as other:
        await until(lambda: server.running)
        await other.left()
        assert server.cancelled == []
        await one.left()
        assert server.cancelled == [server.requests[1].id]
    assert server.running == {}


async def test_w_http_4_all_go_while_it_is_tokenized(
    app: App, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the engine never hears of it; of two, one may go."""
    go, asked = threading.Event(), threading.Event()
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        asked.set()
        assert go.wait(5)
        return encode(self, "Hi", add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    body = TEXT | {"prompt": "word " * 3000, "truncate_prompt_tokens": 100}
    for leaving in (1, 2):
        go.clear()
        asked.clear()
        async with Visit(app, "/v1/completions", body, KEY) as one, Visit(app, "/v1/completions", body, KEY) as other:
            await until(asked.is_set)
            one.leave()
            if leaving == 2:
                other.leave()
            await asyncio.sleep(0.01)
            go.set()
            await one.left()
            await other.ended()
        assert len(server.requests) == 1


async def test_w_http_4_a_key_lives_as_long_as_its_request(app: App, server: FakeServer) -> None:
    """Afterwards the same request runs again, also after one that failed."""
    server.pause = 0
    for expected in (200, 200, 400, 200):
        body = TEXT if expected == 200 else TEXT | {"n": 0}
        assert (await call(app, "POST", "/v1/completions", body, headers=KEY)).status == expected
    assert len(server.requests) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_w_http_4_all_hear_of_a_failure(app: App, server: FakeServer, stream: bool) -> None:
    """Whether the request is refused or breaks midway."""
    body = TEXT | {"stream": stream}
    server.refusal = Unavailable("no")
    async with Visit(app, "/v1/completions", body, KEY) as one, Visit(app, "/v1/completions", body, KEY) as other:
        assert [(await one.ended()).status, (await other.ended()).status] == [503, 503]
    server.refusal = None
    server.failure, server.break_at = EngineFault("broken"), 10
    async with Visit(app, "/v1/completions", body, KEY) as one, Visit(app, "/v1/completions", body, KEY) as other:
        for visit in (one, other):
            answer = await visit.ended()
            assert (answer.events[-1] if stream else answer.json)["error"]["message"] == "broken"
    assert len(server.requests) == 1
    assert (await call(app, "POST", "/v1/completions", TEXT | {"max_tokens": 5}, headers=KEY)).status == 200


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/completions", {}),
        ("/v1/completions", {"idempotency-key": "other"}),
        ("/v1/completions", KEY | {"authorization": "Bearer other"}),
        ("/v1/chat/completions", KEY),
    ],
)
async def test_w_http_4_what_is_not_the_same(app: App, server: FakeServer, path: str, headers: dict[str, str]) -> None:
    """Another key, another client's key, and the same key on another path name other requests."""
    body = CHAT if "chat" in path else TEXT
    async with Visit(app, "/v1/completions", TEXT, KEY) as one, Visit(app, path, body, headers) as other:
        assert [(await one.ended()).status, (await other.ended()).status] == [200, 200]
    assert len(server.requests) == 2


async def test_w_http_4_many_chats_in_a_body(app: App, server: FakeServer) -> None:
    """Bulk requests too: none of theirs runs twice, and all are given back."""
    path, body = "/v1/chat/completions/batch", [CHAT, CHAT | {"n": 2}]
    async with Visit(app, path, body, KEY) as one, Visit(app, path, body, KEY) as other:
        answers = [await one.ended(), await other.ended()]
    assert answers[0].status == 200
    assert answers[0].content == answers[1].content
    assert len(server.requests) == 2
    server.held = True
    async with Visit(app, path, body, KEY) as one, Visit(app, path, body, KEY) as other:
        await until(lambda: len(server.running) == 2)
        await one.left()
        assert server.cancelled == []
        await other.left()
    assert len(server.cancelled) == 2


async def test_w_http_4_a_deadline_is_the_clients_own(app: App, server: FakeServer) -> None:
    """The first one's time is over; who came later has some left."""
    server.held = True
    body = TEXT | {"timeout_s": 0.3}
    async with Visit(app, "/v1/completions", body, KEY) as one:
        await until(lambda: server.running)
        await asyncio.sleep(0.2)
        async with Visit(app, "/v1/completions", body, KEY) as other:
            assert (await one.ended()).status == 408
            assert server.cancelled == []
            assert (await other.ended()).status == 408
    assert len(server.cancelled) == 1


async def test_w_http_4_nothing_is_to_be_computed(app: App, server: FakeServer) -> None:
    """An answer that needs no engine comes to all."""
    body = TEXT | {"max_tokens": 0, "echo": True}
    async with Visit(app, "/v1/completions", body, KEY) as one, Visit(app, "/v1/completions", body, KEY) as other:
        await one.ended()
        await other.ended()
    assert said(one) == said(other) == "Hi"
    assert one.answer.content == other.answer.content
    assert server.requests == []


async def test_w_http_4_a_key_has_a_length(app: App, make: Callable[..., App]) -> None:
    """Up to 255 bytes; no value is no key."""
    for length, status in ((0, 200), (255, 200), (256, 400)):
        answer = await call(app, "POST", "/v1/completions", TEXT, headers={"idempotency-key": "x" * length})
        assert answer.status == status


def test_w_http_4_what_is_kept_is_the_answer() -> None:
    """A long answer is kept in few pieces, and is whole and in order whenever somebody comes."""
    past = Past()
    for step in range(1, 10_001):
        past.add(Delta(0, f"{step},", step, "stop" if step == 10_000 else None, None, [step, step + 1]))
        assert sum(map(len, past._levels)) < 3 * WIDTH
        if step % 977 == 0 or step == 10_000:
            joined = past.joined()
            assert joined.text == "".join(f"{one}," for one in range(1, step + 1))
            assert joined.ids == [id for one in range(1, step + 1) for id in (one, one + 1)]
            assert joined.tokens == step
    assert past.joined().finish_reason == "stop"
