"""W-SSE and the streamed half of W-CHAT: framing, and what happens when the client is slow."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message

from tests.api.fakes import FakeServer, Heard, post
from toka.api.app import App
from toka.api.chunks import ChatChunks, TextChunks, encode_text
from toka.api.exchange import Exchange
from toka.api.relay import Paced
from toka.api.reply import Tally
from toka.api.stream import EventStream, resume
from toka.errors import BadRequest, EngineFault
from toka.request import Delta

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
TEXT: dict[str, Any] = {"prompt": "Hi", "stream": True}


async def test_w_sse_1_framing(app: App) -> None:
    """Each event is one `data:` line of JSON and an empty line. W-SSE-2: `[DONE]` once, last."""
    content = (await post(app, "chat/completions", CHAT)).content
    *events, rest = content.split(b"\n\n")
    assert rest == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event for event in events)
    assert events[-1] == b"data: [DONE]"
    assert all(json.loads(event[6:]) for event in events[:-1])


async def test_w_sse_1_one_line_for_every_reader(app: App, server: FakeServer) -> None:
    """No text breaks an event, not even for clients that split lines wherever Unicode does."""
    text = "a\nb\r\nc\x0bd\x0ce\x1cf\x85g\u2028h\u2029i\u00e9\U0001f980"
    server.script = lambda request, index: [text, text]
    content = (await post(app, "completions", TEXT)).content.decode()
    lines = [line for line in content.splitlines() if line]
    assert len(lines) == 3
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:2]) == text * 2
    assert json.loads(encode_text(text)) == text


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_w_sse_5_same_text(app: App, server: FakeServer, path: str) -> None:
    """The chunks joined are the text of the same request without stream, and so is the usage."""
    server.script = lambda request, index: ["Ünï", "", "cödé ", f"{index}", "\n"]
    body = {"n": 3, **(CHAT if path.startswith("chat") else TEXT), "stream_options": {"include_usage": True}}
    events = (await post(app, path, body)).events
    del body["stream_options"]
    whole = (await post(app, path, body | {"stream": False})).json
    texts = ["", "", ""]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    assert texts == [c["text"] if "text" in c else c["message"]["content"] for c in whole["choices"]]
    assert events[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_w_sse_8_identical_labels(app: App, path: str) -> None:
    """id, created, model, object and fingerprint are the same on every chunk."""
    body = (CHAT if path.startswith("chat") else TEXT) | {
        "stream_options": {"include_usage": True},
        "model": "org/alias",
    }
    events = (await post(app, path, body)).events
    labels = {(e["id"], e["created"], e["model"], e["object"], e["system_fingerprint"]) for e in events}
    assert len(labels) == 1
    assert labels.pop()[2:4] == ("org/alias", "chat.completion.chunk" if path.startswith("chat") else "text_completion")


async def test_w_chat_5_chunks(app: App) -> None:
    """The role, the text, the end: one finish_reason a choice."""
    events = (await post(app, "chat/completions", CHAT | {"n": 2})).events
    for index in (0, 1):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["delta"] for choice in choices[1:-1]] == [{"content": t} for t in ("Hello", ", ", "world", "!")]
        assert choices[-1]["delta"] == {}
        assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["stop"]
    assert all("usage" not in event and "error" not in event for event in events)


async def test_w_cmp_1_chunks(app: App) -> None:
    """No role chunk; the last text comes with the end."""
    events = (await post(app, "completions", TEXT)).events
    assert [event["choices"][0]["text"] for event in events] == ["Hello", ", ", "world", "!"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "stop"]


async def test_w_chat_6_usage(app: App) -> None:
    """One more chunk without choices; null on all others."""
    events = (await post(app, "chat/completions", CHAT | {"stream_options": {"include_usage": True}})).events
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert all(event["choices"] and event["usage"] is None for event in events[:-1])


async def test_w_chat_6_no_usage(app: App) -> None:
    """Nowhere unless asked for."""
    for options in ({}, {"include_usage": False}, {"include_usage": None}, None):
        events = (await post(app, "completions", TEXT | {"stream_options": options})).events
        assert all("usage" not in event for event in events)


async def test_w_chat_6_running_usage(app: App) -> None:
    """continuous_usage_stats: the usage so far on every chunk."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await post(app, "completions", TEXT | {"stream_options": options})).events
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 4]


async def test_w_chat_6_options_without_stream(app: App) -> None:
    """stream_options say something of a stream only."""
    answer = await post(app, "completions", {"prompt": "x", "stream_options": {"include_usage": True}})
    assert (answer.status, answer.error["param"]) == (400, "stream_options")


async def test_w_err_7_before_the_first_byte(app: App, server: FakeServer) -> None:
    """A failure before anything was sent is a plain status."""
    server.failure, server.break_at = EngineFault("broken"), 0
    answer = await post(app, "completions", TEXT)
    assert answer.status == 500
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-should-retry"] == "false"
    assert answer.error["message"] == "broken"


async def test_w_err_7_after_the_first_byte(app: App, server: FakeServer) -> None:
    """A failure later is an event, then `[DONE]`."""
    server.failure, server.break_at = EngineFault("broken"), 2
    answer = await post(app, "completions", TEXT)
    assert answer.status == 200
    assert [("error" in event) for event in answer.events] == [False, False, True]
    assert answer.events[-1] == {
        "error": {"message": "broken", "type": "server_error", "param": None, "code": "engine_error"}
    }


class Client:
    """The far end of a stream: a `send` that waits while `slow`."""

    def __init__(self) -> None:
        self.writable = asyncio.Event()
        self.writable.set()
        self.messages: list[Message] = []
        self.calls = 0
        self.error: Exception | None = None

    async def send(self, message: Message) -> None:
        self.calls += 1
        while not self.writable.is_set():
            await self.writable.wait()
        await asyncio.sleep(0) if message.get("pause") else None
        if self.error is not None:
            raise self.error
        self.messages.append(message)

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    @property
    def text(self) -> str:
        return b"".join(message["body"] for message in self.messages[1:]).decode()

    def events(self) -> list[Any]:
        return [json.loads(event[6:]) for event in self.text.split("\n\n") if event.startswith("data: {")]


Open = Callable[..., EventStream]


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
async def stream(client: Client) -> AsyncIterator[Open]:
    """A stream to the client, of two choices of text unless said."""
    opened: list[EventStream] = []

    def open_stream(choices: int = 2, chat: bool = False, silence: float = 15.0) -> EventStream:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        tally = Tally(choices, 3)
        label = {"id": "x", "created": 1, "model": "m", "fingerprint": "f"}
        chunks = (ChatChunks if chat else TextChunks)(tally, **label, include_usage=False, running=False)  # type: ignore[arg-type]
        opened.append(EventStream(Exchange(scope, client.receive, client.send), tally, chunks, silence=silence))
        return opened[-1]

    yield open_stream
    for one in opened:
        one.close()


async def settle() -> None:
    """Let tasks run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_w_sse_7_one_write_a_step(stream: Open, client: Client) -> None:
    """All of a step is written at once, inside deliver: no task, no wait."""
    one = stream()
    one.deliver([Delta(0, "a", 1), Delta(1, "b", 1)])
    assert [message["type"] for message in client.messages] == ["http.response.start", "http.response.body"]
    one.deliver([Delta(0, "c", 2), Delta(1, "d", 2)])
    assert len(client.messages) == 3
    assert [event["choices"][0]["text"] for event in client.events()] == ["a", "b", "c", "d"]
    one.deliver([Delta(0, "", 2)])
    assert len(client.messages) == 3, "a delta without text is no chunk"
    one.deliver([Delta(0, "e", 3, "stop"), Delta(1, "", 3, "length")])
    assert client.messages[-1]["more_body"] is False
    assert client.text.endswith("data: [DONE]\n\n")
    assert one.finished.done()
    one.deliver([Delta(0, "late", 4)])
    one.fail(EngineFault("late"))
    assert len(client.messages) == 4, "nothing after the end"


async def test_w_sse_9_slow_client(stream: Open, client: Client) -> None:
    """While a client does not read, one write waits and everything else is joined to one delta a choice."""
    one = stream()
    one.deliver([Delta(0, "a", 1)])
    client.writable.clear()
    for step in range(2, 1000):
        one.deliver([Delta(0, f"{step},", step), Delta(1, f"{step};", step)])
    assert client.calls == 3, "the headers, the first, and the one that waits"
    assert len(client.messages) == 2
    client.writable.set()
    await settle()
    events = client.events()
    assert len(events) == 5, "the first, the two that waited, and one a choice"
    for index, separator in ((0, ","), (1, ";")):
        text = "".join(event["choices"][0]["text"] for event in events if event["choices"][0]["index"] == index)
        assert text == ("a" if index == 0 else "") + "".join(f"{step}{separator}" for step in range(2, 1000))
    one.deliver([Delta(0, "x", 1000, "stop"), Delta(1, "y", 1000, "stop")])
    assert client.text.endswith("[DONE]\n\n")
    assert client.text.count("[DONE]") == 1


@pytest.mark.parametrize("chat", [False, True])
async def test_w_sse_9_ends_while_waiting(stream: Open, client: Client, chat: bool) -> None:
    """The end of an answer waits too, and then comes once."""
    one = stream(1, chat)
    client.writable.clear()
    one.deliver([Delta(0, "a", 1)])
    one.deliver([Delta(0, "b", 2)])
    one.deliver([Delta(0, "c", 3, "stop", "END")])
    await settle()
    assert client.messages == []
    assert not one.finished.done()
    client.writable.set()
    await settle()
    assert one.finished.done()
    choices = [event["choices"][0] for event in client.events()]
    texts = [choice["delta"].get("content", "") if chat else choice["text"] for choice in choices]
    assert "".join(texts) == "abc"
    assert [choice["finish_reason"] for choice in choices].count("stop") == 1
    assert choices[-1]["stop_reason"] == "END"
    assert client.text.endswith("[DONE]\n\n")


async def test_w_sse_9_fails_while_waiting(stream: Open, client: Client) -> None:
    """A failure comes after what was there before it."""
    one = stream(1)
    one.deliver([Delta(0, "a", 1)])
    client.writable.clear()
    one.deliver([Delta(0, "b", 2)])
    one.deliver([Delta(0, "c", 3)])
    one.fail(EngineFault("broken"))
    client.writable.set()
    await settle()
    *events, error = client.events()
    assert "".join(event["choices"][0]["text"] for event in events) == "abc"
    assert error["error"]["message"] == "broken"
    assert client.text.endswith("[DONE]\n\n")
    assert one.finished.done()


async def test_hang_up_while_waiting(stream: Open, client: Client) -> None:
    """A stream that is closed in the middle of a write leaves no task behind."""
    one = stream(1)
    client.writable.clear()
    one.deliver([Delta(0, "a", 1)])
    one.hang_up()
    one.close()
    await settle()
    assert one.finished.done()
    assert [task for task in asyncio.all_tasks() if "_send_rest" in repr(task)] == []
    assert client.messages == []


@pytest.mark.parametrize("wait", [False, True])
async def test_a_broken_send_is_a_hang_up(stream: Open, client: Client, wait: bool) -> None:
    """The engine never sees an exception of the connection."""
    one = stream(1)
    client.error = OSError("gone")
    if wait:
        client.writable.clear()
    one.deliver([Delta(0, "a", 1)])
    client.writable.set()
    await settle()
    assert one.finished.done()
    one.deliver([Delta(0, "b", 2)])
    assert client.messages == []


async def test_a_delta_that_cannot_be_encoded(stream: Open, client: Client) -> None:
    """Nor one of the encoder: the client is told, the engine goes on."""
    one = stream(1)
    one.deliver([Delta(0, "a", 1)])
    one.deliver([Delta(0, "\ud800", 2)])
    assert client.events()[-1]["error"]["code"] == "engine_error"
    assert one.finished.done()


async def test_w_sse_3_ping_while_queued(stream: Open, client: Client) -> None:
    """After a silence the headers go out with a comment, and another after each silence; text puts it off."""
    one = stream(1, silence=0.05)
    await asyncio.sleep(0.07)
    assert client.messages[0]["status"] == 200
    assert client.text == ": ping\n\n"
    for _ in range(4):
        await asyncio.sleep(0.025)
        one.deliver([Delta(0, "a", 1)])
    assert client.text.count(": ping") <= 2, "only the silence before the first text"
    before = client.text.count(": ping")
    await asyncio.sleep(0.12)
    assert client.text.count(": ping") >= before + 1
    one.fail(BadRequest("no"))
    assert client.events()[-1]["error"]["message"] == "no", "the status is out already"
    count = len(client.messages)
    await asyncio.sleep(0.1)
    assert len(client.messages) == count, "no ping after the end"


async def test_no_headers_before_there_is_something(stream: Open, client: Client) -> None:
    """Until the first delta everything is open, a failure above all."""
    one = stream(1)
    assert client.messages == []
    error = EngineFault("broken")
    one.fail(error)
    assert one.failure is error
    assert client.messages == []


# resume: half-run coroutines


async def drive(make: Callable[[], Awaitable[object]]) -> object:
    """Run the first part by hand and the rest in a task, as streams do."""
    driven = make().__await__()
    waiting = driven.send(None)
    await asyncio.sleep(0)
    return await asyncio.get_running_loop().create_task(_awaiting(driven, waiting))


async def _awaiting(driven: Any, waiting: object) -> object:
    return await resume(driven, waiting)


async def test_resume_goes_on_to_the_result() -> None:
    """Through several waits, of futures and of bare yields, to the value."""
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    loop.call_later(0.01, first.set_result, 1)
    loop.call_later(0.02, second.set_result, 2)

    async def work() -> int:
        one: int = await first
        await asyncio.sleep(0)
        two: int = await second
        return one + two

    assert await drive(work) == 3


async def test_resume_with_a_future_that_is_done_by_now() -> None:
    """The future may be ready before the task begins."""
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, 5)

    async def work() -> int:
        result: int = await future
        return result

    assert await drive(work) == 5


async def test_resume_passes_exceptions() -> None:
    """What the coroutine raises comes out; what is thrown at it goes in, and it may go on from there."""
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.01, future.set_exception, ValueError("no"))

    async def work() -> None:
        await future

    with pytest.raises(ValueError, match="no"):
        await drive(work)

    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            return "cleaned up"
        return "never"

    driven = stubborn().__await__()
    task = asyncio.get_running_loop().create_task(_awaiting(driven, driven.send(None)))
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "cleaned up"


async def test_resume_is_cancelled() -> None:
    """Cancelling the task cancels the coroutine."""
    seen = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    driven = work().__await__()
    task = asyncio.get_running_loop().create_task(_awaiting(driven, driven.send(None)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled"]


# stream_interval


def test_w_sse_7_interval_first_and_last_at_once() -> None:
    """Of each choice the first text and the end do not wait; in between there are so many tokens a delta."""
    heard = Heard()
    paced = Paced(heard, 4)
    for step in range(1, 11):
        paced.deliver([Delta(index, f"{step}", step, "stop" if step == 10 else None) for index in (0, 1)])
    for index in (0, 1):
        mine = [(delta.text, delta.tokens) for delta in heard.deltas if delta.index == index]
        assert mine == [("1", 1), ("2345", 5), ("6789", 9), ("10", 10)]


def test_w_sse_7_interval_first_text() -> None:
    """Tokens without a text are not the first: what comes when a character is complete is not kept back."""
    heard = Heard()
    paced = Paced(heard, 8)
    for step, text in enumerate(("", "", "é", "x"), 1):
        paced.deliver([Delta(0, text, step)])
    assert [delta.text for delta in heard.deltas] == ["é"]


def test_w_sse_7_interval_and_a_failure() -> None:
    """What is held comes before the error."""
    heard = Heard()
    paced = Paced(heard, 8)
    paced.deliver([Delta(0, "a", 1)])
    paced.deliver([Delta(0, "b", 2)])
    paced.fail(EngineFault("broken"))
    assert [delta.text for delta in heard.deltas] == ["a", "b"]
    assert len(heard.errors) == 1


async def test_w_sse_7_interval_of_the_server(make: Callable[..., App], server: FakeServer) -> None:
    """The option holds where a request does not say."""
    server.script = lambda request, index: ["x"] * 10
    app = make(stream_interval=4)
    assert len((await post(app, "completions", TEXT)).events) == 4
    assert len((await post(app, "completions", TEXT | {"stream_interval": 1})).events) == 10
    assert len((await post(app, "completions", TEXT | {"stream_interval": 100})).events) == 2
    answer = await post(app, "completions", TEXT | {"stream_interval": 0})
    assert (answer.status, answer.error["param"]) == (400, "stream_interval")
