"""W-HTTP-11: what is compressed, and for whom."""

import gzip
import http.client
import json
import threading
from typing import Any

import pytest

from tests.api.conftest import serving
from tests.api.fakes import Answer, FakeServer, call
from toka.api import encoding
from toka.api.app import App
from toka.api.encoding import LEAST, accepts_gzip

LONG: dict[str, Any] = {"prompt": "x" * LEAST, "echo": True, "max_tokens": 100}


def opened(answer: Answer) -> Any:
    """The JSON in a compressed answer, whose length is the one declared."""
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["vary"] == "accept-encoding"
    assert int(answer.headers["content-length"]) == len(answer.content)
    return json.loads(gzip.decompress(answer.content))


async def test_w_http_11_compressed_when_asked(app: App) -> None:
    """The same answer, smaller."""
    plain = await call(app, "POST", "/v1/completions", LONG, headers={})
    answer = await call(app, "POST", "/v1/completions", LONG, headers={"accept-encoding": "gzip, deflate"})
    assert opened(answer)["choices"] == plain.json["choices"]
    assert len(answer.content) < len(plain.content)
    assert "content-encoding" not in plain.headers
    assert plain.headers["vary"] == "accept-encoding", "for caches, in either form"


async def test_w_http_11_not_below_a_kilobyte(app: App) -> None:
    """What is short stays as it is."""
    answer = await call(app, "POST", "/v1/completions", {"prompt": "x"}, headers={"accept-encoding": "gzip"})
    assert len(answer.content) < LEAST
    assert "content-encoding" not in answer.headers
    assert answer.json["choices"]


async def test_w_http_11_never_a_stream(app: App, server: FakeServer) -> None:
    """Events are not kept back by a compressor."""
    server.script = lambda request, index: ["x" * 500] * 20
    for headers in ({"accept-encoding": "gzip"}, {"accept-encoding": "*"}):
        answer = await call(app, "POST", "/v1/completions", LONG | {"stream": True}, headers=headers)
        assert "content-encoding" not in answer.headers
        assert len(answer.events) == 20


async def test_w_http_11_head(app: App) -> None:
    """HEAD tells of the answer that GET would get."""
    headers = {"accept-encoding": "gzip"}
    got, head = [await call(app, method, "/openapi.json", headers=headers) for method in ("GET", "HEAD")]
    assert opened(got)["openapi"]
    assert head.content == b""
    assert head.headers["content-length"] == got.headers["content-length"]


async def test_w_http_11_large_answers_in_a_thread(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressing megabytes holds nobody up."""
    threads = []
    gzip_in = encoding._gzip

    def noted(body: bytes) -> bytes:
        threads.append(threading.current_thread())
        return gzip_in(body)

    monkeypatch.setattr(encoding, "_gzip", noted)
    text = "word " * 100_000
    answer = await call(app, "POST", "/tokenize", {"prompt": text}, headers={"accept-encoding": "gzip"})
    assert opened(answer)["count"] == len(text)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ([], False),
        ([b""], False),
        ([b"gzip"], True),
        ([b"GZIP"], True),
        ([b"x-gzip"], True),
        ([b"deflate, gzip;q=1.0, *;q=0.5"], True),
        ([b"*"], True),
        ([b"br, *;q=0.1"], True),
        ([b"gzip;q=0"], False),
        ([b"gzip; q=0.000"], False),
        ([b"gzip;q=0, *"], False),
        ([b"*;q=0"], False),
        ([b"br"], False),
        ([b"identity"], False),
        ([b"identity;q=0.5, gzip"], True),
        ([b"identity, gzip;q=0.5"], False),
        ([b"gzip;q=much"], False),
        ([b"gzipped"], False),
        ([b"br", b"gzip"], True),
    ],
)
def test_w_http_11_what_is_asked(asked: list[bytes], wanted: bool) -> None:
    """Qualities, stars, several headers."""
    assert accepts_gzip([(b"accept", b"gzip"), *((b"accept-encoding", value) for value in asked)]) is wanted


def test_w_http_11_through_the_server(app: App) -> None:
    """And the connection is used again."""
    with serving(app) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        for _ in range(2):
            connection.request("POST", "/v1/completions", json.dumps(LONG), {"accept-encoding": "gzip"})
            response = connection.getresponse()
            assert response.headers["content-encoding"] == "gzip"
            assert json.loads(gzip.decompress(response.read()))["choices"][0]["text"].startswith("xxx")
        connection.close()
