"""One connection of a client: requests out, answers in, timed; and as little CPU per chunk as Python allows.

A chunk that is one whole event of a stream, which nearly all are, is recognised by a few searches in its bytes and
counted, not decoded. All else goes through a parser that takes answers apart however they were cut.
"""

import asyncio
import re
from time import perf_counter
from typing import NamedTuple

import msgspec
from msgspec import Struct

EVENT_END = re.compile(rb"\r?\n\r?\n")
CHOICES = (b'"choices":[{', b'"choices": [{')
"""How an event with choices shows. In the text of a choice the quotation marks would be escaped."""
HEAD_END = b"\r\n\r\n"
SHOWN = 300
"""Characters of an error that are shown."""


class Delta(Struct):
    content: str | None = None


class Choice(Struct):
    """A choice of an event, or of a whole answer, of either endpoint."""

    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    message: Delta | None = None


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class Event(Struct):
    """The part of an event, or of a whole answer, that is wanted."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: object = None


decode = msgspec.json.Decoder(Event).decode


class Head(NamedTuple):
    """The first lines of an answer."""

    status: int
    chunked: bool
    length: int | None
    """Bytes of the body, if it is known and not in chunks."""
    keeps: bool
    """Whether the connection takes another request afterwards."""
    events: bool

    @classmethod
    def read(cls, head: bytes) -> "Head":
        """Raises ValueError for what is not HTTP/1."""
        lines = head.decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(f"no HTTP/1: {lines[0][:80]!r}")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        chunked = fields.get("transfer-encoding", "").lower().endswith("chunked")
        length = int(fields["content-length"]) if "content-length" in fields and not chunked else None
        connection = fields.get("connection", "keep-alive" if version == "HTTP/1.1" else "close").lower()
        keeps = connection != "close" and (chunked or length is not None)
        return cls(int(rest[:3]), chunked, length, keeps, fields.get("content-type", "").startswith("text/event"))


class Received:
    """What came for one request."""

    __slots__ = ("body", "choices", "done", "error", "sent", "texts", "times", "usage")

    def __init__(self, sent: float) -> None:
        self.sent = sent
        self.times: list[float] = []
        """When each chunk with choices came."""
        self.choices: list[int] = []
        """The choice that each belongs to, where there is more than one."""
        self.texts: dict[int, list[str]] = {}
        """By choice, where they are wanted."""
        self.usage: Usage | None = None
        self.error: str | None = None
        self.done = False
        """Whether the stream said `[DONE]`."""
        self.body: list[bytes] = []
        """Of an answer that is no stream."""


class Broken(Exception):
    """The connection ended before the answer did. `untouched`: not a byte of it had come."""

    def __init__(self, reason: str, untouched: bool) -> None:
        super().__init__(reason)
        self.untouched = untouched


class Connection(asyncio.Protocol):
    """One request at a time. With `text` the texts of answers are kept."""

    def __init__(self, text: bool) -> None:
        self.open = False
        self._text = text
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Received] | None = None
        self._received = Received(0.0)
        self._reset(False)

    def _reset(self, many: bool) -> None:
        self._many = many
        self._head: Head | None = None
        self._fast = False
        """Whether chunks may be counted without a look inside: events of one choice whose text nobody wants."""
        self._buffer = bytearray()
        """Bytes as they came that are not taken apart yet."""
        self._event = b""
        """An event that has not come whole."""
        self._left = 0
        """Bytes of a body of known length that are still to come."""

    def ask(self, request: bytes, many: bool) -> "asyncio.Future[Received]":
        """Send a request; `many`: of more than one choice. The future ends with the answer, or raises Broken."""
        assert self._transport is not None
        assert self._waiter is None
        self._waiter = asyncio.get_running_loop().create_future()
        self._reset(many)
        self._received = Received(perf_counter())
        self._transport.write(request)
        return self._waiter

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It can be used."""
        self._transport = transport  # type: ignore[assignment]  # create_connection makes no other
        self.open = True

    def connection_lost(self, error: Exception | None) -> None:
        """An answer of unknown length ends so; any other is broken."""
        self.open = False
        if self._waiter is None:
            return
        head = self._head
        if error is None and head is not None and not head.chunked and head.length is None:
            self._finish(perf_counter())
        else:
            untouched = head is None and not self._buffer
            self._fail(Broken(str(error or "the server closed the connection within an answer"), untouched))

    def data_received(self, data: bytes) -> None:
        """Count, or take apart."""
        now = perf_counter()
        try:
            if self._fast and not self._buffer and not self._event:
                # SIZE CRLF data: {…"choices":[{…} LF LF CRLF, and nothing before or after it.
                size, end = data.find(b"\r\n", 0, 10), len(data) - 4
                if (
                    data.startswith(b"data: {", size + 2)
                    and data.endswith(b"\n\n\r\n")
                    and data.count(b"\n") == 4  # one event: in JSON itself there is none
                    and (CHOICES[0] in data or CHOICES[1] in data)
                    and int(data[:size], 16) == end - size
                ):
                    self._received.times.append(now)
                    return
            if self._waiter is None:
                self.close()  # nobody asked
                return
            self._take(data, now)
        except (ValueError, msgspec.DecodeError) as error:
            self._fail(Broken(f"not understood: {error}", False))
            self.close()

    def _take(self, data: bytes, now: float) -> None:
        buffer = self._buffer
        buffer += data
        if self._head is None:
            end = buffer.find(HEAD_END)
            if end < 0:
                return
            self._head = Head.read(bytes(buffer[:end]))
            del buffer[: end + len(HEAD_END)]
            self._left = self._head.length or 0
            streamed = self._head.chunked and self._head.events and self._head.status == 200
            self._fast = streamed and not self._many and not self._text
        head = self._head
        if head.chunked:
            self._unpack(now)
            return
        body = bytes(buffer)
        buffer.clear()
        self._payload(body, now)
        if head.length is not None:
            self._left -= len(body)
            if self._left <= 0:
                self._finish(now)

    def _unpack(self, now: float) -> None:
        """Take whole chunks off the buffer."""
        buffer, start = self._buffer, 0
        payload = []
        ended = False
        while (line := buffer.find(b"\r\n", start)) >= 0:
            size = int(bytes(buffer[start:line]).partition(b";")[0], 16)
            end = line + 2 + size
            if len(buffer) < end + 2:
                break
            payload.append(bytes(buffer[line + 2 : end]))
            start = end + 2
            if not size:  # fields after the last chunk are not supported: nobody sends any
                ended = True
                break
        del buffer[:start]
        if payload:
            self._payload(b"".join(payload), now)
        if ended:
            self._finish(now)

    def _payload(self, payload: bytes, now: float) -> None:
        """A piece of the body, cut anywhere."""
        assert self._head is not None
        if not self._head.events or self._head.status != 200:
            self._received.body.append(payload)
            return
        *events, self._event = EVENT_END.split(self._event + payload)
        for event in events:
            lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
            if lines == [b"[DONE]"]:
                self._received.done = True
            elif lines:
                self._look(decode(b"\n".join(lines)), now)

    def _look(self, event: Event, now: float) -> None:
        """What an event, or a whole answer, says."""
        received = self._received
        if event.error is not None:
            received.error = shown(event.error)
        if event.usage is not None:
            received.usage = event.usage
        for choice in event.choices:
            received.times.append(now)
            if self._many:
                received.choices.append(choice.index)
            if self._text:
                part = choice.delta or choice.message
                text = (part.content if part else choice.text) or ""
                received.texts.setdefault(choice.index, []).append(text)

    def _finish(self, now: float) -> None:
        waiter, head, received = self._waiter, self._head, self._received
        assert waiter is not None
        assert head is not None
        if head.status != 200:
            received.error = f"{head.status}: {complaint(b''.join(received.body))}"
        elif not head.events:
            self._look(decode(b"".join(received.body)), now)
        elif not received.done and received.error is None:
            received.error = "the stream ended without [DONE]"
        received.body.clear()
        self._waiter = None
        self._fast = False
        if not head.keeps:
            self.open = False
            self.close()
        if not waiter.done():
            waiter.set_result(received)

    def _fail(self, broken: Broken) -> None:
        waiter, self._waiter = self._waiter, None
        self.open = self._fast = False
        if waiter is not None and not waiter.done():
            waiter.set_exception(broken)


def complaint(body: bytes) -> str:
    """What an error's body says, on one line."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        decoded = body.decode(errors="replace")
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else decoded
    return shown(error)


def shown(error: object) -> str:
    """An error of the API: its message, where it has one."""
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:SHOWN]
