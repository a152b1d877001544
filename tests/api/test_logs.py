"""What the log says of requests, and what it never says."""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.fakes import FakeServer, FakeTemplate, call
from toka.api.app import App
from toka.config import Config
from toka.errors import BadRequest
from toka.logs import TEXT, Json, json_line, set_up

SECRETS = ("PROMPT", "ANSWER", "sk-key", "sk-wrong")


def lines(caplog: pytest.LogCaptureFixture, formatter: logging.Formatter) -> list[str]:
    return [formatter.format(record) for record in caplog.records]


async def test_w_http_2_each_line_of_the_log(app: App, caplog: pytest.LogCaptureFixture) -> None:
    """As JSON each line about a request is one object with its id; the last one is how it was answered."""
    caplog.set_level(logging.DEBUG, "toka")
    await call(app, "GET", "/v1/models/none", headers={"x-request-id": "mine-1"})
    said = [json.loads(line) for line in lines(caplog, Json())]
    assert said
    assert {line["request_id"] for line in said} == {"mine-1"}
    assert (said[-1]["method"], said[-1]["path"], said[-1]["status"]) == ("GET", "/v1/models/none", 404)
    assert said[-1]["seconds"] >= 0
    assert {"time", "level", "logger", "message"} <= said[-1].keys()


async def test_a_line_a_request_only_for_debug(app: App, caplog: pytest.LogCaptureFixture) -> None:
    """At info, thousands of requests a second leave no line."""
    caplog.set_level(logging.INFO, "toka")
    await call(app, "GET", "/v1/models")
    await call(app, "GET", "/v1/nosuch")
    assert caplog.records == []


@pytest.mark.parametrize("formatter", [Json(), logging.Formatter(TEXT)], ids=["json", "text"])
async def test_neither_prompts_nor_texts_nor_keys(
    make: Callable[..., App],
    server: FakeServer,
    template: FakeTemplate,
    caplog: pytest.LogCaptureFixture,
    formatter: logging.Formatter,
) -> None:
    """Whatever comes of a request, at the finest level: what was sent, what was answered and keys stay out."""
    caplog.set_level(logging.DEBUG)
    server.script = lambda request, index: ["ANSWER", " more"]
    app = make(api_key="sk-key")
    right = {"content-type": "application/json", "authorization": "Bearer sk-key"}
    message = [{"role": "user", "content": "PROMPT"}]
    bodies: list[Any] = [
        {"messages": message},
        {"messages": message, "stream": True},
        {"messages": message, "PROMPT": 1},
        {"messages": [{"role": "PROMPT", "content": "x"}]},
        {"messages": message, "model": "PROMPT"},
        b'{"messages": PROMPT',
    ]
    for body in bodies:
        await call(app, "POST", "/v1/chat/completions", body, headers=right)
    template.error = BadRequest("the template says PROMPT")
    await call(app, "POST", "/v1/chat/completions", bodies[0], headers=right)
    await call(app, "POST", "/v1/chat/completions", bodies[0], headers=right | {"authorization": "Bearer sk-wrong"})
    await call(app, "GET", "/server_info", headers=right)
    said = "\n".join(lines(caplog, formatter))
    assert said.count("/v1/chat/completions") >= 8
    assert [secret for secret in SECRETS if secret in said] == []


def test_a_line_is_one_line() -> None:
    """Whatever is in a message; a traceback is a field."""
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = logging.LogRecord("toka.x", logging.ERROR, "", 0, "a\nb %s", ("c",), (ValueError, error, None))
    line = Json().format(record)
    assert "\n" not in line
    said = json.loads(line)
    assert (said["message"], said["level"], said["logger"]) == ("a\nb c", "error", "toka.x")
    assert "two\nlines" in said["traceback"]
    assert json.loads(json_line("m", "info", "toka", 0.25))["time"] == "1970-01-01T00:00:00.250Z"


@pytest.mark.parametrize("format", ["text", "json"])
def test_the_option_chooses(format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """log_format and log_level are those of the root logger's one handler."""
    root = logging.Logger("root")
    monkeypatch.setattr(logging, "root", root)
    set_up(Config(log_format=format, log_level="warning"))
    [handler] = root.handlers
    assert isinstance(handler.formatter, Json) == (format == "json")
    assert root.level == logging.WARNING
