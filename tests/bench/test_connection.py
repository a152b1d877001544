"""Answers are timed and counted the same however they are cut, and what is wrong with them is said."""

import asyncio

import pytest

import bench.connection
from bench.client import answer
from bench.connection import Broken, Connection, Received
from bench.messages import Answer, Ask

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Clock:
    """Shows what it was set to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(bench.connection, "perf_counter", made)
    return made


class Wire(asyncio.Transport):
    """Takes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True


def chunk(payload: bytes, upper: bool = False) -> bytes:
    size = b"%X" if upper else b"%x"
    return size % len(payload) + b"\r\n" + payload + b"\r\n"


def event(text: str, index: int = 0) -> bytes:
    return b'data: {"id":"x","choices":[{"index":%d,"text":"%s","finish_reason":null}]}\n\n' % (index, text.encode())


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"
END = chunk(USAGE) + chunk(DONE) + b"0\r\n\r\n"


def asking(text: bool = False, many: bool = False) -> "tuple[Connection, asyncio.Future[Received]]":
    connection = Connection(text)
    connection.connection_made(Wire())
    return connection, connection.ask(b"POST", many)


def report(waiting: "asyncio.Future[Received]", n: int = 1, stream: bool = True) -> Answer:
    return answer(Ask(0, 0.0, b"", "", n), waiting.result(), stream)


async def test_each_chunk_has_its_time(clock: Clock) -> None:
    """The first chunk with choices, the last one, and what lies between; the usage's chunk has none."""
    clock.now = 1.0
    connection, waiting = asking()
    for now, data in [(1.5, STREAM), (2.0, chunk(event("a"))), (2.25, chunk(event("b"))), (4.0, chunk(event("c")))]:
        clock.now = now
        connection.data_received(data)
    clock.now = 9.0
    connection.data_received(END)
    made = report(waiting)
    assert (made.sent, made.first, made.last, made.chunks) == (1.0, 2.0, 4.0, 3)
    assert made.gaps == bench.client.packed([0.25, 1.75])
    assert (made.prompt_tokens, made.completion_tokens, made.error) == (7, 3, None)
    assert connection.open


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
async def test_cut_anywhere(clock: Clock, size: int, text: bool) -> None:
    """Pieces of any size give the same counts and texts; upper case sizes, comments and CRLF lines too."""
    connection, waiting = asking(text)
    crlf = event("ü").replace(b"\n", b"\r\n")
    whole = STREAM + chunk(event("a") + event("b")) + chunk(b": ping\n\n", upper=True) + chunk(crlf, upper=True) + END
    for start in range(0, len(whole), size):
        connection.data_received(whole[start : start + size])
    made = report(waiting)
    assert (made.chunks, made.completion_tokens, made.error) == (3, 3, None)
    assert made.text == ("abü" if text else None)


async def test_text_that_looks_like_an_event(clock: Clock) -> None:
    """What a text says is no structure: its quotation marks and newlines are escaped."""
    connection, waiting = asking()
    connection.data_received(STREAM)
    tricky = rb'data: {"choices":[],"x":"\"choices\":[{\n\ndata: "}' + b"\n\n"
    connection.data_received(chunk(tricky))
    connection.data_received(chunk(event(r"\"choices\":[{\n\n")))
    connection.data_received(END)
    assert report(waiting).chunks == 1


async def test_gaps_of_several_choices_are_of_each_choice(clock: Clock) -> None:
    """Choices that come in turn do not shorten each other's gaps."""
    connection, waiting = asking(many=True)
    connection.data_received(STREAM)
    for now, index in [(1.0, 0), (1.5, 1), (3.0, 0), (3.25, 1)]:
        clock.now = now
        connection.data_received(chunk(event("a", index)))
    connection.data_received(END)
    made = report(waiting, n=2)
    assert made.gaps == bench.client.packed([2.0, 1.75])


async def test_whole_answers(clock: Clock) -> None:
    """Without streaming there is one time; the connection is kept, or not, as the server says."""
    body = b'{"choices":[{"index":0,"text":"ab"}],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
    connection, waiting = asking(text=True)
    clock.now = 2.0
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body[:10])
    assert not waiting.done()
    clock.now = 5.0
    connection.data_received(body[10:])
    made = report(waiting, stream=False)
    assert (made.first, made.last, made.completion_tokens, made.text, made.gaps) == (5.0, 5.0, 3, "ab", b"")
    assert connection.open
    waiting = connection.ask(b"POST", False)
    connection.data_received(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + body)
    assert not waiting.done()
    connection.connection_lost(None)
    assert report(waiting, stream=False).completion_tokens == 3
    assert not connection.open


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b'HTTP/1.1 400 No\r\ncontent-length: 27\r\n\r\n{"error":{"message":"bad"}}', "400: bad"),
        (b"HTTP/1.1 502 No\r\ncontent-length: 4\r\n\r\noops", "502: oops"),
        (
            STREAM + chunk(event("a")) + chunk(b'data: {"error":{"message":"gone"}}\n\n') + chunk(DONE) + b"0\r\n\r\n",
            "gone",
        ),
        (STREAM + chunk(event("a")) + chunk(USAGE) + b"0\r\n\r\n", "without [DONE]"),
        (STREAM + chunk(event("a")) + chunk(DONE) + b"0\r\n\r\n", "no usage"),
        (STREAM + END, "no choices"),
    ],
    ids=["400", "502", "error", "no end", "no usage", "empty"],
)
async def test_answers_that_are_none(sent: bytes, reason: str) -> None:
    """Each is a failure with its reason on one line."""
    connection, waiting = asking()
    connection.data_received(sent)
    made = report(waiting)
    assert made.error is not None
    assert reason in made.error


@pytest.mark.parametrize(
    "sent", [STREAM + chunk(event("a"))[:-9], b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"], ids=["stream", "whole"]
)
async def test_connections_that_break(sent: bytes) -> None:
    """Within an answer that is a failure; before the first byte of one, another connection may be tried."""
    connection, waiting = asking()
    connection.data_received(sent)
    connection.connection_lost(ConnectionResetError("reset"))
    with pytest.raises(Broken, match="reset") as caught:
        waiting.result()
    assert not caught.value.untouched
    connection, waiting = asking()
    connection.connection_lost(None)
    with pytest.raises(Broken) as caught:
        waiting.result()
    assert caught.value.untouched
    assert not connection.open


@pytest.mark.parametrize(
    "sent", [b"SSH-2.0\r\n\r\n", STREAM + b"zz\r\nabc", STREAM + chunk(b"data: {]\n\n")], ids=["head", "size", "json"]
)
async def test_what_is_not_understood(sent: bytes) -> None:
    """The server speaks something else: a failure that says so, and the connection is closed."""
    connection, waiting = asking()
    connection.data_received(sent)
    with pytest.raises(Broken, match="not understood"):
        waiting.result()
