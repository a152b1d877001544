"""What a load generator and its client processes say to each other over pipes: msgpack behind a length."""

import struct
from typing import BinaryIO

import msgspec
from msgspec import Struct

LENGTH = struct.Struct("<I")


class Setup(Struct, frozen=True, kw_only=True, tag=True):
    """To a client, first: how to ask. It connects, and says Connected."""

    host: str
    port: int
    tls: bool
    insecure: bool
    """Take any certificate."""
    path: str
    headers: dict[str, str]
    stream: bool
    text: bool
    """Keep the answers' texts."""
    connections: int
    """To open before the first request is sent."""


class Ask(Struct, frozen=True, tag=True):
    """To a client: a request to send."""

    index: int
    """Its number among all of them."""
    at: float
    """Seconds after Go."""
    body: bytes
    id: str
    """For the X-Request-Id header; empty: none."""
    n: int
    """Choices."""


class Go(Struct, frozen=True, tag=True):
    """To a client, after all Asks of a round: run them, from this moment (time.perf_counter) on.

    Asks that come after the round's Finished make another one.
    """

    at: float
    concurrency: int
    """Requests at a time; 0: any number."""
    wave: bool
    """Start the next `concurrency` requests when all of the last have ended, not one by one."""


class Connected(Struct, frozen=True, tag=True):
    """From a client: it waits for Go."""


class Answer(Struct, frozen=True, kw_only=True, tag=True):
    """From a client: what became of a request. Times are time.perf_counter's, which processes share."""

    index: int
    sent: float
    """When the request was written to its connection."""
    first: float = 0.0
    """When the first chunk with choices came; without streaming, the answer."""
    last: float = 0.0
    chunks: int = 0
    gaps: bytes = b""
    """float64[…], seconds between chunks of the same choice, in the order in which they came."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Of all choices."""
    text: str | None = None
    """Of all choices, one after the other."""
    error: str | None = None
    """One line. Figures other than times mean nothing then."""


class Finished(Struct, frozen=True, kw_only=True, tag=True):
    """From a client, after the last Answer of a round: how it fared itself."""

    cpu: float
    """Seconds of CPU from Go to the last answer."""
    wall: float
    lags: bytes
    """float64[…], seconds by which its event loop was late, sampled all the time."""


ToClient = Setup | Ask | Go
FromClient = Connected | Answer | Finished

_encode = msgspec.msgpack.Encoder().encode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
decode_from_client = msgspec.msgpack.Decoder(FromClient).decode


def write(stream: BinaryIO, message: ToClient | FromClient) -> None:
    """Append a message. It leaves when the stream is flushed."""
    data = _encode(message)
    stream.write(LENGTH.pack(len(data)) + data)


def read(stream: BinaryIO) -> bytes | None:
    """The next message, not decoded; None at the end. Raises EOFError where it ends within one."""
    head = stream.read(LENGTH.size)
    if not head:
        return None
    if len(head) == LENGTH.size:
        (length,) = LENGTH.unpack(head)
        data = stream.read(length)
        if len(data) == length:
            return data
    raise EOFError("a message broke off")
