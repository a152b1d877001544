"""No body holds up the others: what is costly to parse is refused, and what is large is parsed apart."""

import asyncio
import http.client
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.conftest import serving
from tests.api.fakes import FakeServer, call, post
from toka.api import weight
from toka.api.app import App

SIZE = 32 << 20
LONGEST = 1.0
"""Ten times the tenth of a second that is meant."""


def filled(unit: bytes, before: bytes = b'{"prompt":[', after: bytes = b"]}", size: int = SIZE) -> bytes:
    """A body of `size` bytes at most that repeats a unit."""
    return before + unit * ((size - len(before) - len(after)) // len(unit) - 1) + unit.rstrip(b",") + after


TOO_MANY: dict[str, Callable[[], bytes]] = {
    "numbers": lambda: filled(b"1,"),
    "decimals": lambda: filled(b"1.5,"),
    "lists": lambda: filled(b"[],"),
    "objects": lambda: filled(b"{},", b'{"messages":['),
    "messages": lambda: filled(b'{"role":"user","content":"x"},', b'{"messages":['),
    "texts": lambda: filled(b'"",'),
    "members": lambda: b"{" + b",".join(b'"%x":1' % number for number in range(2_500_000)) + b"}",
    "deep lists": lambda: filled(b"[" * 50 + b"]" * 50 + b","),
}
LARGE: dict[str, Callable[[], bytes]] = {
    "text": lambda: filled(b"word, [word] {x: y} ", b'{"prompt":"', b'"}'),
    "escapes": lambda: filled(b'\\"[,\\\\', b'{"prompt":"', b'"}'),
    "letters": lambda: filled("é".encode(), b'{"prompt":"', b'"}'),
    "ids": lambda: filled(b"123,", size=11 << 20),
    "decimals": lambda: filled(b"1.5,", size=11 << 20),
    "wrong ids": lambda: filled(b"12345,", size=16 << 20),
    "lists": lambda: filled(b"[],", size=800_000),
    "chats": lambda: filled(b'{"role":"user","content":"x"},', b'{"messages":[', size=1_900_000),
}
"""Close to what is still parsed."""


async def longest_hold(app: App, body: bytes, path: str = "/v1/completions") -> tuple[int, str, float]:
    """The status and message of a refusal, and the seconds for which the loop was held while it came about."""
    worst = 0.0

    async def beat() -> None:
        nonlocal worst
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.002)
            now = time.monotonic()
            worst, last = max(worst, now - last), now

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)
    answer = await call(app, "POST", path, body)
    await asyncio.sleep(0)
    beating.cancel()
    return answer.status, answer.error["message"], worst


@pytest.mark.parametrize("kind", list(TOO_MANY))
async def test_too_many_values_are_refused(app: App, server: FakeServer, kind: str) -> None:
    """413 before anything is parsed, and meanwhile the loop turns."""
    status, message, held = await longest_hold(app, TOO_MANY[kind]())
    assert status == 413
    assert "3,000,000 numbers, 1,000,000 strings or 300,000 arrays and objects" in message
    assert held < LONGEST
    assert server.requests == []


@pytest.mark.parametrize("kind", list(LARGE))
async def test_large_bodies_are_parsed_apart(app: App, kind: str) -> None:
    """Bodies of any kind that are just not refused for their size are refused for what they say, quickly enough."""
    path = "/v1/chat/completions" if kind == "chats" else "/v1/completions"
    status, _, held = await longest_hold(app, LARGE[kind](), path)
    assert status == 400
    assert held < LONGEST


async def test_many_chats_take_turns(app: App, server: FakeServer) -> None:
    """Thousands of requests in a body are long work, but others get their turns in between."""
    worst, last = 0.0, time.monotonic()

    async def beat() -> None:
        nonlocal worst, last
        while True:
            await asyncio.sleep(0.002)
            worst, last = max(worst, time.monotonic() - last), time.monotonic()

    beating = asyncio.create_task(beat())
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    answer = await call(app, "POST", "/v1/chat/completions/batch", [chat] * 5000)
    beating.cancel()
    assert len(answer.json) == len(server.requests) == 5000
    assert worst < LONGEST


async def test_a_body_has_only_so_many_choices(app: App, server: FakeServer) -> None:
    """Over all its chats, as over all prompts of a completion."""
    chat = {"messages": [{"role": "user", "content": "x"}], "n": 128}
    answer = await call(app, "POST", "/v1/chat/completions/batch", [chat] * 129)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "requests", "array_above_max_length")
    assert server.requests == []


@pytest.mark.parametrize("path", ["/v1/chat/completions/batch", "/tokenize", "/detokenize"])
async def test_every_endpoint_weighs(app: App, path: str) -> None:
    """All bodies are read in the same way."""
    answer = await call(app, "POST", path, filled(b"[],", b'{"requests":[', size=4 << 20))
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")


async def test_token_strings_are_named_apart(app: App) -> None:
    """A text of a million tokens with all their names."""
    worst = 0.0
    last = time.monotonic()

    async def beat() -> None:
        nonlocal worst, last
        while True:
            await asyncio.sleep(0.002)
            worst, last = max(worst, time.monotonic() - last), time.monotonic()

    beating = asyncio.create_task(beat())
    answer = await call(app, "POST", "/tokenize", {"prompt": "x" * 500_000, "return_token_strs": True})
    beating.cancel()
    assert len(answer.json["token_strs"]) == 500_000
    assert worst < LONGEST


async def test_a_large_body_is_served(app: App, server: FakeServer) -> None:
    """Parsing apart changes nothing."""
    prompts = [[1, 2, 3]] * 10_000
    answer = await post(app, "completions", {"prompt": prompts, "max_tokens": 1})
    assert answer.status == 200
    assert server.requests[0].prompts == prompts


@pytest.mark.parametrize("depth", [100, 490, 700, 1000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt":%b}'),
        ("/v1/completions", b'{"prompt":"x","logit_bias":%b}'),
        ("/v1/chat/completions", b'{"messages":%b}'),
        ("/v1/chat/completions", b'{"n":1.0,"messages":[{"role":"user","content":"x"}],"user":%b,"top_k":%b}'),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":%b}]}'),
        ("/v1/chat/completions/batch", b'[{"messages":%b}]'),
        ("/tokenize", b'{"messages":%b}'),
        ("/detokenize", b'{"tokens":%b}'),
    ],
)
async def test_nested_bodies_are_the_clients_fault(app: App, path: str, body: bytes, depth: int) -> None:
    """However deep, a 400."""
    nested = b"[" * depth + b"]" * depth
    assert (await call(app, "POST", path, body.replace(b"%b", nested))).status == 400


def test_w_ver_1_health_is_quick(app: App) -> None:
    """Whoever sends what, /health answers at once."""
    body = filled(b"[],")

    def send(port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", "/v1/completions", body)
        assert connection.getresponse().status == 413
        connection.close()

    with serving(app) as port:
        senders = [threading.Thread(target=send, args=(port,)) for _ in range(2)]
        for sender in senders:
            sender.start()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        while any(sender.is_alive() for sender in senders):
            start = time.monotonic()
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b""
            assert time.monotonic() - start < LONGEST
            time.sleep(0.01)
        connection.close()


def by_hand(body: bytes) -> int:
    """The weight of JSON, byte by byte."""
    total = quotes = index = 0
    inside = False
    while index < len(body):
        letter = chr(body[index])
        if letter == "\\":
            index += 1
        elif letter == '"':
            inside = not inside
            quotes += 1
        elif not inside:
            total += {",": 1, ":": weight.MEMBER, "[": weight.CONTAINER, "{": weight.CONTAINER}.get(letter, 0)
        index += 1
    return total + quotes // 2 * weight.STRING


TEXTS = st.text(st.sampled_from('\\",:[{x'), max_size=12).map(
    lambda text: b'"' + text.encode().replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'
)


@given(
    pieces=st.lists(TEXTS | st.sampled_from([b",", b":", b"[", b"{", b"1"]), max_size=12),
    chunk=st.integers(1, 9),
)
def test_weight_is_that_of_what_stands_outside_of_strings(pieces: list[bytes], chunk: int) -> None:
    """Quotes, backslashes and everything else, wherever the parts that are looked at together begin."""
    body = b"".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight, "CHUNK", chunk)
        patch.setattr(weight, "STRING", 0)
        assert weight.weight(body) == by_hand(body)
    assert weight.weight(body) == by_hand(body)
