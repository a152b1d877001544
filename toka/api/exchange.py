"""One HTTP exchange: what came in, and the one answer that goes out. And the endpoints that hold them."""

import re
import secrets
from abc import ABC, abstractmethod
from asyncio import Task, get_running_loop, timeout
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from toka.api import encoding
from toka.api.service import shown
from toka.errors import BodyTooLarge, MethodNotAllowed, RequestError, WrongContentType

Headers = tuple[tuple[bytes, bytes], ...]

SCOPE_KEY = "toka.exchange"
JSON = b"application/json"

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class ClientGone(Exception):
    """Nobody waits for this answer any more. No error: the message says when it was noticed."""


class GoneEarly(ClientGone):
    """It was noticed before the engine heard of the request."""


def request_id(asked: bytes) -> bytes:
    """What an answer carries as `x-request-id`: what was asked for, if it is fit to print, else a new one."""
    return asked if _REQUEST_ID.fullmatch(asked) else b"req_" + secrets.token_hex(12).encode()


class Exchange:
    """A request and its answer. Every answer carries `x-request-id`: the client's own if it is fit to print.

    `tenant` is what the client's API key is called, `status` that of the answer that has begun, `error` what it tells.
    """

    __slots__ = ("_headers", "error", "method", "path", "receive", "request_id", "scope", "send", "status", "tenant")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = request_id(self._headers.get(b"x-request-id", b""))
        self.tenant = ""
        self.error: RequestError | None = None
        self.status = 0

    def __repr__(self) -> str:
        return f"<Exchange {self.request_id.decode()} {self.method} {shown(self.path)}>"

    @property
    def started(self) -> bool:
        """The status line is out: no other answer can be given."""
        return self.status > 0

    @property
    def labels(self) -> dict[str, object]:
        """What each line of the log says of it."""
        return {"request_id": self.request_id.decode()}

    def header(self, name: bytes) -> bytes:
        """The value of a header, the last one of several; empty if there is none. `name` is in small letters."""
        return self._headers.get(name, b"")

    async def read_json(self, limit: int) -> bytes:
        """The body, undecoded. Raises WrongContentType, BodyTooLarge beyond `limit` bytes, ClientGone."""
        kind = self._headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind not in (b"", JSON) and not kind.endswith(b"+json"):
            raise WrongContentType("The body must be JSON: send it with the header content-type: application/json.")
        if self._headers.get(b"content-encoding", b"identity").lower() not in (b"", b"identity"):
            raise WrongContentType("Encoded bodies are not accepted: send the body without content-encoding.")
        too_large = BodyTooLarge(f"The body of your request is larger than the {limit} bytes that this server takes.")
        declared = self._headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limit:
            raise too_large
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise GoneEarly("the request was not complete")
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise too_large
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def start(self, status: int, headers: Headers) -> Message:
        """The message that begins the answer, for those who `send` by themselves."""
        self.status = status
        return {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"x-request-id", self.request_id)],
        }

    async def respond(self, status: int, body: bytes, headers: Headers = ((b"content-type", JSON),)) -> None:
        """A whole answer, compressed if the client asks for it. Raises ClientGone if it cannot be written."""
        if len(body) >= encoding.LEAST:
            headers = (*headers, (b"vary", b"accept-encoding"))
            if encoding.accepts_gzip(self.scope["headers"]):
                headers = (*headers, (b"content-encoding", b"gzip"))
                body = await encoding.gzipped(body)
        length = (b"content-length", str(len(body)).encode())
        try:
            await self.send(self.start(status, (*headers, length)))
            await self.send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})
        except Exception as error:  # uvloop's closed transport raises RuntimeError
            raise ClientGone(f"a write failed: {error!r}") from error

    async def disconnected(self) -> None:
        """Give the server a moment to notice the hang-up: it complains of unfinished answers to those who are there."""
        with suppress(TimeoutError):
            async with timeout(1.0):
                while (await self.receive())["type"] != "http.disconnect":
                    pass

    async def respond_json(self, value: object) -> None:
        """200 with a value as JSON."""
        await self.respond(200, msgspec.json.encode(value))

    async def fail(self, error: RequestError, headers: Headers = ()) -> None:
        """The error's status, headers and object."""
        self.error = error
        own = tuple((name.encode(), value.encode()) for name, value in error.sent_headers().items())
        await self.respond(error.status, msgspec.json.encode(error.body()), ((b"content-type", JSON), *own, *headers))


class Endpoint(ABC):
    """A path of the API, as a raw ASGI application: no Request, no Response, no wrappers."""

    methods: ClassVar[tuple[str, ...]] = ("GET", "HEAD")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Starlette's router calls this; `App` has put the exchange into the scope."""
        exchange: Exchange = scope[SCOPE_KEY]
        if exchange.method in self.methods:
            await self.serve(exchange)
            return
        allow = ", ".join(self.methods)
        error = MethodNotAllowed(f"{exchange.method} is not allowed on {shown(exchange.path)}. Allowed: {allow}.")
        await exchange.fail(error, ((b"allow", allow.encode()),))

    @abstractmethod
    async def serve(self, exchange: Exchange) -> None:
        """Answer, or raise RequestError before the answer has begun."""


class Hangup:
    """Listens for the client's hang-up while somebody else makes the answer. Begin when the body has been read."""

    __slots__ = ("_receive", "_task", "_tell", "gone")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._tell: Callable[[], None] | None = None
        self.gone = False
        self._task: Task[None] = get_running_loop().create_task(self._listen())

    def tell(self, callback: Callable[[], None]) -> None:
        """Whom to call, once. At once if the client has gone already."""
        self._tell = callback
        if self.gone:
            callback()

    def close(self) -> None:
        """Stop listening."""
        self._tell = None
        self._task.cancel()

    async def _listen(self) -> None:
        with suppress(Exception):  # a connection that cannot be read has no client, whatever the server calls it
            while (await self._receive())["type"] != "http.disconnect":
                pass
        self.gone = True
        if self._tell is not None:
            self._tell()
