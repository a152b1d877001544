"""A scripted engine, a chat template in a line, and an ASGI client."""

import asyncio
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

from tests.fakes import END_OF_TEXT
from toka.errors import RequestError
from toka.request import Delta, Listener, Request, Score, Scores

USER = {"role": "user", "content": "Hi"}
"""A conversation's first message, unless a test says another."""
Script = Callable[[Request, int], list[str]]
"""The pieces of text, one a token, that a request's choice (by index) is answered with."""


def hello(request: Request, index: int) -> list[str]:
    """What the engine says unless told otherwise."""
    return ["Hello", ", ", "world", "!"]


def arrays(scores: list[Score]) -> Scores | None:
    """Scores of equally many most probable tokens, as the engine brings them."""
    if not scores:
        return None
    top = [pair for score in scores for pair in score.top]
    return Scores(
        len(scores[0].top),
        bytearray(struct.pack(f"<{len(scores)}f", *(score.logprob for score in scores))),
        bytearray(struct.pack(f"<{len(top)}i", *(id for id, _ in top))),
        bytearray(struct.pack(f"<{len(top)}f", *(logprob for _, logprob in top))),
        bytearray(struct.pack(f"<{len(scores)}i", *(score.rank for score in scores))),
    )


class FakeGeneration:
    """A request in the scripted engine."""

    def __init__(self, server: "FakeServer", request: Request, listener: Listener) -> None:
        self.server = server
        self.request = request
        self.listener = listener
        self.step = 0
        self.cached_tokens = server.cached_tokens
        self.pieces = [server.script(request, index) for index in range(len(request.prompts) * request.n)]
        self.limit = request.max_tokens or 10**9

    def cancel(self) -> None:
        if self.server.running.pop(self.request.id, None) is not None:
            self.server.cancelled.append(self.request.id)

    def advance(self) -> None:
        """One step: the next piece of each choice."""
        if self.request.id not in self.server.running:
            return
        if self.server.break_at == self.step and self.server.failure is not None:
            del self.server.running[self.request.id]
            self.listener.fail(self.server.failure)
            return
        deltas = [delta for index in range(len(self.pieces)) if (delta := self.delta(index)) is not None]
        self.step += 1
        if self.step >= min(self.limit, max(map(len, self.pieces))):
            del self.server.running[self.request.id]
        if deltas:
            self.listener.deliver(deltas)
        if self.request.id in self.server.running:
            self.server.later(self.advance)

    def delta(self, index: int) -> Delta | None:
        pieces = self.pieces[index]
        length = min(self.limit, len(pieces))
        if self.step >= length:
            return None
        tokens = self.step + 1
        last = tokens == length
        reason = ("stop" if length == len(pieces) else "length") if last else None
        prompt: Scores | None = None
        if self.request.sampling.prompt_logprobs >= 0 and (self.step == 0 or not self.request.stream):
            prompt = arrays([self.server.score(id) for id in self.request.prompts[index // self.request.n][1:]])
        start = self.step if self.request.stream else 0
        if not self.request.stream and not last:
            return None
        ids: list[int] = []
        for piece in pieces[start:tokens]:
            ids.append(self.server.ids.get(piece, piece.encode()[0] if piece else END_OF_TEXT))
        scores = arrays([self.server.score(id) for id in ids]) if self.request.sampling.logprobs >= 0 else None
        text = "".join(pieces[start:tokens])
        return Delta(index, text, tokens, reason, self.server.stop_reason if last else None, ids, scores, prompt)


class FakeServer:
    """Implements `toka.request.Server`. Set the attributes to say what should happen."""

    def __init__(self, script: Script = hello) -> None:
        self.script = script
        self.ready = True
        self.max_model_len = 2048
        self.pause = 0.0
        """Seconds between steps."""
        self.held = False
        """Take requests and do nothing with them."""
        self.refusal: RequestError | None = None
        """Raised by submit."""
        self.full: RequestError | None = None
        """Raised by check_room."""
        self.failure: RequestError | None = None
        self.break_at = -1
        """The step at which `failure` ends the request."""
        self.cached_tokens = 0
        self.stop_reason: str | int | None = None
        self.ids: dict[str, int] = {}
        """Ids of pieces; else the first byte of a piece is its id."""
        self.score: Callable[[int], Score] = lambda id: Score(-0.5, [(id, -0.5), (id ^ 1, -1.25), (66, -9999.0)], 1)
        self.requests: list[Request] = []
        self.running: dict[str, FakeGeneration] = {}
        self.cancelled: list[str] = []

    def check_room(self, tenant: str) -> None:
        if self.full is not None:
            raise self.full

    def submit(self, request: Request, listener: Listener) -> FakeGeneration:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        generation = self.running[request.id] = FakeGeneration(self, request, listener)
        if not self.held:
            self.later(generation.advance)
        return generation

    def later(self, step: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(self.pause, step)

    def info(self) -> dict[str, object]:
        return {
            "requests_open": len(self.running),
            "running": len(self.running),
            "blocks": 64,
            "free_blocks": 64 - len(self.running),
        }


class FakeTemplate:
    """`role: content` lines. Keeps what it was given."""

    def __init__(self, takes_parts: bool = False) -> None:
        self.takes_parts = takes_parts
        self.source = "{{ messages }}"
        self.variables: frozenset[str] = frozenset()
        self.error: Exception | None = None
        self.messages: list[dict[str, Any]] = []
        self.kwargs: dict[str, Any] = {}

    def other(self, source: str) -> "FakeTemplate":
        template = FakeTemplate(self.takes_parts)
        template.source = source
        return template

    def render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        if self.error is not None:
            raise self.error
        self.messages = [dict(message) for message in messages]
        self.kwargs = kwargs
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


@dataclass
class Answer:
    """What an application said to one request."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, which must have exactly these four keys."""
        body = self.json
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = body["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """The chunks of a stream, decoded, without `[DONE]`, which must be there once and last."""
        text = self.content.decode()
        assert text.endswith("data: [DONE]\n\n")
        assert text.count("[DONE]") == 1
        lines = [event for event in text.split("\n\n")[:-2] if not event.startswith(":")]
        assert all(line.startswith("data: {") and "\n" not in line for line in lines)
        return [json.loads(line.removeprefix("data: ")) for line in lines]


async def call(
    app: ASGIApp,
    method: str,
    path: str,
    body: object = None,
    *,
    headers: dict[str, str] | None = None,
    parts: list[bytes] | None = None,
) -> Answer:
    """One request, in this process. `body` is sent as JSON unless it is bytes; `parts` are sent chunk by chunk."""
    if parts is None:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        parts = [raw]
    sent = {"content-type": "application/json"} if headers is None else headers
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
    }
    answer = Answer()
    over = asyncio.Event()
    incoming = list(parts)

    async def receive() -> Message:
        if incoming:
            part = incoming.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(incoming)}
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.content += message["body"]
            if not message.get("more_body", False):
                over.set()

    await app(scope, receive, send)
    return answer


async def post(app: ASGIApp, path: str, body: object, **more: Any) -> Answer:
    """POST to a path under /v1."""
    return await call(app, "POST", f"/v1/{path}", body, **more)


async def chat(app: ASGIApp, messages: Any = None, **fields: object) -> Answer:
    """POST /v1/chat/completions."""
    return await post(app, "chat/completions", {"messages": messages or [USER], **fields})


async def complete(app: ASGIApp, prompt: object, **fields: object) -> Answer:
    """POST /v1/completions."""
    return await post(app, "completions", {"prompt": prompt, **fields})


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.errors: list[RequestError] = []

    def deliver(self, deltas: list[Delta]) -> None:
        self.deltas += deltas

    def fail(self, error: RequestError) -> None:
        self.errors.append(error)
