"""uvicorn, as it serves the API: what is set, and the answers that are given without asking the application."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Iterator
from http import HTTPStatus

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from toka.errors import BadRequest, HeadTooLarge, RequestError

BACKLOG = 2048
"""Connections that may wait to be accepted."""
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients keep one for reuse."""
MAX_HEAD = 65536
"""Bytes of a request line and headers, beyond what the first read brought. The parser knows no bound, and copies what
it has with each read."""
FLUSH = 5
"""Seconds that clients have, at the end, to take what was already answered."""
OFFER = (b"upgrade", b"http2-settings")
"""Headers that offer another protocol, and what the connection header says of them."""


class Protocol(HttpToolsProtocol):
    """HTTP/1.1. Bytes that are none get the error object, as everything else does that is wrong."""

    _in_head = False
    """A request has begun, and its headers are not complete."""
    _head = 0
    """Bytes of them that came after the first read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Small writes leave at once, whatever the event loop thinks of the listening socket."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """As uvicorn's, with a bound for heads, and with bodies of requests that offer another protocol."""
        self._unset_keepalive_if_required()
        was_in_head = self._in_head
        left: memoryview | None = memoryview(data)
        try:
            while left is not None:
                left = self._feed(left)
        except httptools.HttpParserError:
            self.send_400_response("")
            return
        if was_in_head and self._in_head:
            self._head += len(data)
            if self._head > MAX_HEAD:
                self._refuse(HeadTooLarge(f"The headers of your request are longer than {MAX_HEAD} bytes."))

    def on_message_begin(self) -> None:
        """The parser calls this at the first byte of a request."""
        super().on_message_begin()
        self._in_head = True
        self._head = 0

    def on_headers_complete(self) -> None:
        """The parser calls this when the head is whole. What offers another protocol is read once more."""
        if not self.parser.should_upgrade():
            self._in_head = False
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The parser calls this at the last byte of a request."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for bytes that its parser does not take."""
        self._refuse(BadRequest("What was received is not an HTTP request."))

    def _feed(self, data: memoryview) -> memoryview | None:
        """Let the parser read. Returns what follows a head that offered another protocol. Raises HttpParserError."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline()
            return data[offer.args[0] :]
        return None

    def _decline(self) -> None:
        """The client would rather speak another protocol, as Java's does with every request, but need not. The parser
        takes what follows the head for that protocol's and would drop the body: a new one gets the head again, without
        the offer. Raises HttpParserError for a tunnel, which is no offer."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserError
        head = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                options = [one.strip() for one in value.split(b",")]
                value = b", ".join(one for one in options if one.lower() not in OFFER)
            if name not in OFFER and value:
                head.append(b"%b: %b" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self.parser.feed_data(b"\r\n".join([*head, b"", b""]))

    def _refuse(self, error: RequestError) -> None:
        """The connection ends, for nobody knows where the next request would begin. An answer that has begun is cut
        off: no other can stand inside it."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = msgspec.json.encode(error.body())
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
                f"x-request-id: req_{secrets.token_hex(12)}\r\n"
                "content-type: application/json\r\n"
                f"content-length: {len(body)}\r\n"
                "connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


class Http(uvicorn.Server):
    """uvicorn, which leaves signals to us."""

    def __init__(self, app: ASGIApp, *, keep_alive: int = KEEP_ALIVE, tls: tuple[str, str] | None = None) -> None:
        """`keep_alive`: seconds that an idle connection stays open. `tls`: files of the certificate and of its key."""
        cert, key = tls or (None, None)
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=keep_alive,
                ssl_certfile=cert,
                ssl_keyfile=key,
                # A net under those who stop the server, and hang up before.
                timeout_graceful_shutdown=2 * FLUSH,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers."""
        yield
