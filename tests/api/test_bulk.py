"""Many chat requests in one body."""

from typing import Any

import pytest

from tests.api.fakes import FakeServer, call
from toka.api.app import App
from toka.errors import Unavailable

PATHS = ["/v1/chat/completions/batch", "/custom/synchronous-batch-completions"]


def ask(text: str, **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


@pytest.mark.parametrize("path", PATHS)
async def test_answers_in_order(app: App, server: FakeServer, path: str) -> None:
    """The answers stand in the order of the requests, whichever ends first; a list may be bare."""
    server.script = lambda request, index: ["x"] * len(request.prompts[0])
    requests = [ask("a" * length, n=length % 2 + 1) for length in (9, 1, 5, 2)]
    for body in (requests, {"requests": requests}):
        answers = (await call(app, "POST", path, body)).json
        assert [answer["object"] for answer in answers] == ["chat.completion"] * 4
        assert [len(answer["choices"]) for answer in answers] == [2, 2, 2, 1]
        assert [answer["usage"]["prompt_tokens"] for answer in answers] == [16, 8, 12, 9]
        assert all(
            len(answer["choices"][0]["message"]["content"]) == answer["usage"]["prompt_tokens"] for answer in answers
        )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], "requests"),
        ({}, "requests"),
        ({"requests": None}, "requests"),
        ({"requests": []}, "requests"),
        ({"requests": "x"}, "requests"),
        ({"requests": [ask("x")], "y": 1}, "y"),
        ([5], "requests[0]"),
        ([ask("x"), ask("x", n=0)], "requests[1].n"),
        ([ask("x"), ask("x", stream=True)], "requests[1].stream"),
        ([ask("x"), ask("x" * 5000)], "requests[1].messages"),
        ([ask("x", top_k="x")], "requests[0].top_k"),
    ],
)
async def test_one_bad_request_fails_all(app: App, server: FakeServer, body: object, param: str) -> None:
    """400 with the path of what is wrong, before anything runs."""
    answer = await call(app, "POST", PATHS[0], body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert server.requests == []


async def test_no_json(app: App) -> None:
    """Never a traceback."""
    assert (await call(app, "POST", PATHS[0], b"[{")).status == 400


async def test_an_engine_that_fails(app: App, server: FakeServer) -> None:
    """Its error is the answer, and what else runs is given back."""
    server.failure, server.break_at = Unavailable("gone"), 1
    answer = await call(app, "POST", PATHS[0], [ask("x"), ask("y")])
    assert answer.status == 503
    assert server.running == {}


async def test_deadline(app: App, server: FakeServer) -> None:
    """One request's timeout_s ends the whole."""
    server.held = True
    answer = await call(app, "POST", PATHS[0], [ask("x"), ask("y", timeout_s=0.01)])
    assert answer.status == 408
    assert server.running == {}
