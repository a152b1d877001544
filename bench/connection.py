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
LAST = b"0\r\n\r\n"
"""What ends an answer in chunks."""
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
        fields = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
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
    """One request at a time. `many`: tell choices apart. `text`: keep the texts."""

    __slots__ = ("_buffer", "_events", "_head", "_left", "_plain", "_received", "_text", "_waiter", "open", "transport")

    def __init__(self, text: bool) -> None:
        self._text = text
        self.open = False
        self.transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Received] | None = None
        self._received = Received(0.0)
        self._reset(False)

    def _reset(self, plain: bool) -> None:
        self._head: Head | None = None
        self._buffer = bytearray()
        """Bytes as they came that are not taken apart yet."""
        self._events = b""
        """An event that has not come whole."""
        self._left = 0
        """Bytes of a body of known length that are still to come."""
        self._plain = plain
        """Whether chunks may be counted without a look inside: of one choice, without its text."""

    def ask(self, request: bytes, many: bool) -> "asyncio.Future[Received]":
        """Send a request. The future ends with the answer, or raises Broken."""
        assert self.transport and self._waiter is None
        self._waiter = asyncio.get_running_loop().create_future()
        self._reset(not many and not self._text)
        self._received = Received(perf_counter())
        self.transport.write(request)
        return self._waiter

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It can be used."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.open = True

    def connection_lost(self, error: Exception | None) -> None:
        """An answer of unknown length ends so; any other is broken."""
        self.open = False
        if self._waiter is None:
            return
        head = self._head
        if error is None and head is not None and not head.chunked and head.length is None:
            self._finish()
        else:
            self._fail(str(error or "the server closed the connection"), head is None and not self._buffer)

    def data_received(self, data: bytes) -> None:
        """Count, or take apart."""
        now = perf_counter()
        head = self._head
        if head is not None and head.chunked and head.events and not self._buffer and not self._events and self._plain:
            size = data.find(b"\r\n", 0, 10)
            end = len(data) - 4
            if (
                data.startswith(b"data: ", size + 2)
                and data.find(b"\n\n") == end - size_of_end(data, end)
                and (CHOICES[0] in data or CHOICES[1] in data)
            ):
                self._received.times.append(now)
                return
        self._take(data, now)
