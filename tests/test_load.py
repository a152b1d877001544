"""Hundreds of clients on connections that stay open: good ones, rude ones and broken ones; and nothing is left of them.

The server is a process of its own, with a worker that has no model: the text of every answer is known beforehand.
"""

import asyncio
import contextlib
import json
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
import pytest

from bench.pretend import ASCII, serving
from bench.server import Server
from toka.sim.worker import pretend_tokens

CONNECTIONS = 500
MEGABYTE = 1 << 20
GROWTH = 24 * MEGABYTE
"""Memory that a round may take for good: twelve kilobytes a request, ten times what allocators are seen to keep."""
BACKLOG_OF_A_READER = 8 * MEGABYTE
"""Memory for one client that does not read. What it is owed comes to several times as much."""
MALFORMED = (
    ("/v1/completions", b"{", 400),
    ("/v1/completions", b'{"prompt": "x", "max_tokens": -1}', 400),
    ("/v1/completions", b'{"prompt": [99999999]}', 400),
    ("/v1/chat/completions", b'{"messages": []}', 400),
    ("/v1/completions", b'{"prompt": "\xff"}', 400),
    ("/nowhere", b"{}", 404),
)
"""Path, body, and what is said to it."""

Json = dict[str, Any]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """For all of this module: what one test leaves behind, the next one finds. Its cache is full soon."""
    with serving(0.0, num_blocks=8192) as server:
        yield server
        assert "Traceback" not in server.log


class Client:
    """A connection that is used again and again."""

    def __init__(self, server: Server) -> None:
        parts = urlsplit(server.url)
        self._address = (parts.hostname or "", parts.port or 0)
        self.opened = 0

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address)
        self.opened += 1

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def send(self, path: str, body: bytes) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)

    async def some(self) -> bytes:
        """Whatever comes first."""
        return await self._reader.read(100)

    async def answer(self) -> tuple[int, bytes]:
        """The status, and the whole body."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if b"chunked" not in head:
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            return status, await self._reader.readexactly(length)
        body = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            body += await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        await self._reader.readexactly(2)
        return status, body


def text_of(seed: int, prompt: str, tokens: int) -> str:
    """What the worker makes up."""
    positions = len(prompt) + np.arange(tokens, dtype=np.int64)
    seeds, choices = np.full(tokens, seed, dtype=np.int64), np.zeros(tokens, dtype=np.int64)
    return bytes(pretend_tokens(seeds, choices, positions, ASCII).tolist()).decode()


async def good(client: Client, number: int, stream: bool, tokens: int) -> str:
    """A request whose answer is right to the last letter."""
    prompt = f"client {number} asks "
    body = {"prompt": prompt, "seed": number, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    client.send("/v1/completions", json.dumps(body).encode())
    status, answer = await client.answer()
    assert status == 200, answer
    if stream:
        events = answer.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2] if not event.startswith(":")]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    else:
        text = json.loads(answer)["choices"][0]["text"]
    assert text == text_of(number, prompt, tokens)
    return "streamed" if stream else "whole"


async def rude(client: Client, number: int, random: Random) -> str:
    """One that hangs up: while it is still sending, before there is an answer, or in the middle of it."""
    stream = random.random() < 0.7
    body = {"prompt": f"client {number} leaves ", "max_tokens": 3000, "ignore_eos": True, "stream": stream}
    raw = json.dumps(body).encode()
    client.send("/v1/completions", raw if random.random() < 0.8 else raw[:10])
    if stream and random.random() < 0.8:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.some(), 0.2)
    await client.close()
    await client.open()
    return "left"


async def broken(client: Client, random: Random) -> str:
    """One that is malformed, and is told so; the connection goes on."""
    path, body, expected = random.choice(MALFORMED)
    client.send(path, body)
    status, answer = await client.answer()
    assert status == expected
    assert json.loads(answer)["error"]["message"]
    return "refused"


async def round_of(server: Server, requests: int, tokens: int, seed: int) -> Counter[str]:
    """So many requests over CONNECTIONS connections: a tenth hangs up, a twentieth is malformed, half are streams."""
    done: Counter[str] = Counter()
    numbers = iter(range(requests))

    async def visit() -> None:
        async with Client(server) as client:
            for number in numbers:
                random = Random(seed * requests + number)
                kind = random.random()
                if kind < 0.10:
                    done[await rude(client, number, random)] += 1
                elif kind < 0.15:
                    done[await broken(client, random)] += 1
                else:
                    done[await good(client, number, random.random() < 0.5, tokens)] += 1

    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(visit())
    return done


def info(server: Server) -> Json:
    """/server_info, on a connection of its own."""
    with urllib.request.urlopen(f"{server.url}/server_info", timeout=30) as answer:
        found: Json = json.load(answer)
        return found


async def everything_is_back(server: Server, tasks: int) -> None:
    """No request is open, every block is free, and there are no more tasks than at the start."""
    now: Json = {}
    try:
        async with asyncio.timeout(30):
            while (now.get("requests_open"), now.get("sequences_running"), now.get("tasks")) != (0, 0, tasks):
                await asyncio.sleep(0.05)
                now = await asyncio.to_thread(info, server)
    except TimeoutError:
        raise AssertionError(f"{tasks} tasks at the start, and now {now}") from None
    assert now["blocks_free"] == now["blocks_total"]
    assert now["sequences_waiting"] == 0


def memory(server: Server) -> int:
    """Bytes that the server's process holds in memory."""
    fields = Path(f"/proc/{server.process.pid}/statm").read_text().split()
    return int(fields[1]) * 4096


async def rounds(server: Server, *, count: int, requests: int, tokens: int) -> None:
    """One round to get warm, and more that leave nothing behind, not even memory."""
    tasks = info(server)["tasks"]
    held = 0
    for number in range(1 + count):
        done = await round_of(server, requests, tokens, number)
        assert done.total() == requests
        assert all(done[kind] > 0 for kind in ("streamed", "whole", "left", "refused"))
        await everything_is_back(server, tasks)
        if number == 0:
            held = memory(server)
    assert memory(server) - held < GROWTH


async def test_nothing_is_left_of_two_thousand_requests(server: Server) -> None:
    """Every good answer is right, no request is answered by a fault, and a second round takes no more memory."""
    await rounds(server, count=1, requests=2000, tokens=16)


@pytest.mark.slow
async def test_nothing_is_left_of_a_hundred_thousand_requests(server: Server) -> None:
    """The same for minutes, with longer answers."""
    await rounds(server, count=9, requests=10_000, tokens=64)


def slow_reader(server: Server, body: Json) -> socket.socket:
    """A connection on which a stream was asked for, with little room for what nobody reads."""
    parts = urlsplit(server.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect((parts.hostname or "", parts.port or 0))
    raw = json.dumps(body | {"stream": True}).encode()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
    return connection


async def test_w_sse_9_slow_readers_cost_little_memory(server: Server) -> None:
    """Of a hundred thousand tokens that a client does not read, the server keeps the text and little else; and when it
    reads at last, nothing is missing."""
    start = info(server)
    before = memory(server)
    asked = {"prompt": "go", "n": 32, "max_tokens": 3000, "ignore_eos": True, "seed": 5}
    with slow_reader(server, asked) as connection:
        await sampled(server, start["requests_total"] + 1)
        assert memory(server) - before < BACKLOG_OF_A_READER
        received = await asyncio.to_thread(read_to_the_end, connection)
    texts: Counter[int] = Counter()
    for event in received.split(b"\n\n"):
        if event.startswith(b"data: {"):
            for choice in json.loads(event[6:])["choices"]:
                texts[choice["index"]] += len(choice["text"])
    assert texts == Counter(dict.fromkeys(range(32), 3000))
    await everything_is_back(server, start["tasks"])


async def sampled(server: Server, requests: int) -> None:
    """Until the engine has had so many requests, and has done with them."""
    async with asyncio.timeout(60):
        now: Json = {"requests_total": 0}
        while now["requests_total"] < requests or now["requests_open"]:
            now = await asyncio.to_thread(info, server)


def read_to_the_end(connection: socket.socket) -> bytes:
    """The body of a chunked answer."""
    received = bytearray()
    while not received.endswith(b"\r\n0\r\n\r\n"):
        part = connection.recv(MEGABYTE)
        assert part
        received += part
    body, rest = bytearray(), bytes(received).partition(b"\r\n\r\n")[2]
    start = 0
    while True:
        line = rest.index(b"\r\n", start)
        if not (size := int(rest[start:line], 16)):
            return bytes(body)
        body += rest[line + 2 : line + 2 + size]
        start = line + 2 + size + 2


async def test_b55_half_sent_requests_hold_nobody_up(server: Server) -> None:
    """Hundreds of half heads and half bodies stay open, and others are served as ever; they leave nothing behind."""
    tasks = info(server)["tasks"]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
    parts = urlsplit(server.url)
    with contextlib.ExitStack() as stack:
        for number in range(600):
            half = stack.enter_context(socket.create_connection((parts.hostname, parts.port), timeout=10))
            half.sendall(head[:40] if number % 2 else head + b'\r\n{"prompt": "x')
        started = time.monotonic()
        async with Client(server) as client:
            for number in range(20):
                await good(client, number, number % 2 == 0, 16)
        assert time.monotonic() - started < 5
    await everything_is_back(server, tasks)
