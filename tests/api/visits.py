"""Clients of an application in this process who come together, read as they please, and may leave."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Self

from starlette.types import ASGIApp, Message

from tests.api.fakes import Answer


class Visit:
    """A POST under way: what has come of it, and the end that it takes."""

    def __init__(self, app: ASGIApp, path: str, body: object, headers: dict[str, str]) -> None:
        self.answer = Answer()
        self.writes = 0
        """Pieces of the answer's body."""
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._gone = asyncio.Event()
        self._sent = False
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        self.task = asyncio.create_task(self._run(app, scope))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()
        await self.task

    def leave(self) -> None:
        """Hang up."""
        self._gone.set()

    async def left(self) -> None:
        """Hang up, and wait until that has been noticed."""
        self.leave()
        await asyncio.wait_for(self.task, 5)

    async def ended(self) -> Answer:
        """The whole answer."""
        await asyncio.wait_for(self.task, 10)
        return self.answer

    async def _run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        await app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.answer.status = message["status"]
            self.answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        self.writes += 1
        self.answer.content += message["body"]


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait on this loop for something to become true."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.001)
