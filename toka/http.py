"""uvicorn, as it serves the API: what is set, and the one answer that it gives without asking the application."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Iterator

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from toka.errors import BadRequest

BACKLOG = 2048
"""Connections that may wait to be accepted."""
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients keep one for reuse."""
FLUSH = 5
"""Seconds that clients have, at the end, to take what was already answered."""


class Protocol(HttpToolsProtocol):
    """HTTP/1.1. Bytes that are none get the error object, as everything else does that is wrong."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Small writes leave at once, whatever the event loop thinks of the listening socket."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for bytes that its parser does not take. The connection ends: nobody knows where the next
        request would begin."""
        body = msgspec.json.encode(BadRequest("What was received is not an HTTP request.").body())
        head = (
            "HTTP/1.1 400 Bad Request\r\n"
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
