"""The server's life as its owner sees it: a start that fails early, a start that works, and every way to end."""

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIConnectionError, APIError, AuthenticationError, BadRequestError, InternalServerError, OpenAI
from starlette.types import Receive, Scope, Send

from bench.server import Server, ServerEnded
from tests.fakes import write_tiny_model
from toka.config import Config
from toka.errors import ConfigError, StartError
from toka.http import Http
from toka.listen import listen
from toka.model import ModelFolder
from toka.serve import _answering, _reason, banner, model_names

LONG = 800
"""Tokens of an answer that is still running when something happens to it."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def long_answer(openai: OpenAI) -> Iterator[str | None]:
    """The finish reasons of a long stream's chunks. The first chunk has arrived when this returns."""
    stream = openai.completions.create(
        model="tiny", prompt="go", max_tokens=LONG, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    return (chunk.choices[0].finish_reason for chunk in stream)


def whole_answer(openai: OpenAI) -> int:
    """Tokens of an answer that is not streamed."""
    answer = openai.completions.create(
        model="tiny", prompt="so", max_tokens=LONG, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage
    return answer.usage.completion_tokens


def get(server: Server, path: str) -> Any:
    with urllib.request.urlopen(server.url + path, timeout=10) as answer:
        return json.load(answer)


def gone(server: Server, path: str) -> bool:
    """Whether a path answers 503, or nobody listens."""
    try:
        with urllib.request.urlopen(server.url + path, timeout=10):
            return False
    except urllib.error.HTTPError as error:
        with error:
            return error.code == 503
    except OSError:
        return True


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def worker_pid(server: Server) -> int:
    found = re.search(r"joins: pid (\d+)", server.log)
    assert found
    return int(found[1])


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_b89_sigterm_lets_running_requests_end(tiny: Path) -> None:
    """Answers that were on their way arrive whole, streamed or not; meanwhile nothing new is taken and /health says
    so; the worker leaves, and the exit code is 0."""
    with (
        Server(f"model={tiny}", "kv_cache_num_tokens=4096") as server,
        client(server) as openai,
        ThreadPoolExecutor() as threads,
    ):
        whole = threads.submit(whole_answer, openai)
        running = long_answer(openai)
        until(lambda: get(server, "/server_info")["requests_open"] == 2)
        server.process.send_signal(signal.SIGTERM)
        _wait_for(server, "once more ends at once")
        assert gone(server, "/health")
        with pytest.raises((InternalServerError, APIConnectionError)):
            openai.completions.create(model="tiny", prompt="late", max_tokens=1)
        assert list(running)[-1] == "length"
        assert whole.result(60) == LONG
        assert server.wait() == 0
        assert not alive(worker_pid(server))
        assert "Traceback" not in server.log


def test_the_second_signal_ends_at_once(tiny: Path) -> None:
    """What runs is cut off with an error, and nothing stays behind."""
    with Server(f"model={tiny}", "kv_cache_num_tokens=4096") as server, client(server) as openai:
        running = long_answer(openai)
        server.process.send_signal(signal.SIGINT)
        _wait_for(server, "once more ends at once")
        server.process.send_signal(signal.SIGINT)
        again = time.monotonic()
        with pytest.raises(APIError, match="stopping"):
            list(running)
        assert server.wait() == 0
        assert time.monotonic() - again < 5
        assert not alive(worker_pid(server))


def test_b76_a_worker_that_dies_ends_the_server(tiny: Path) -> None:
    """Whoever waits gets an error within seconds, streamed or not, nobody is taken any more, the last line says what
    happened, and the exit code is 1."""
    with (
        Server(f"model={tiny}", "kv_cache_num_tokens=4096") as server,
        client(server) as openai,
        ThreadPoolExecutor() as threads,
    ):
        whole = threads.submit(whole_answer, openai)
        running = long_answer(openai)
        until(lambda: get(server, "/server_info")["requests_open"] == 2)
        os.kill(worker_pid(server), signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(APIError, match="worker"):
            list(running)
        with pytest.raises((InternalServerError, APIConnectionError)):
            whole.result(60)
        assert time.monotonic() - killed < 10
        with pytest.raises((InternalServerError, APIConnectionError)):
            openai.completions.create(model="tiny", prompt="late", max_tokens=1)
        assert gone(server, "/health")
        assert server.wait() == 1
        assert server.log.splitlines()[-1].startswith("toka: the worker was killed by SIGKILL")
        assert "Traceback" not in server.log


def test_b81_a_model_without_a_chat_template_completes_and_does_not_chat(tiny: Path, tmp_path: Path) -> None:
    """It starts with a warning; a chat is refused with a message that says what is missing."""
    folder = Path(shutil.copytree(tiny, tmp_path / "plain"))
    (folder / "chat_template.jinja").unlink()
    with Server(f"model={folder}", "kv_cache_num_tokens=4096") as server, client(server) as openai:
        assert "has no chat template" in server.log
        assert openai.completions.create(model="plain", prompt="go", max_tokens=3).usage
        with pytest.raises(BadRequestError, match="chat template"):
            openai.chat.completions.create(model="plain", messages=[{"role": "user", "content": "go"}])


def cut(file: Path, size: int) -> None:
    with file.open("r+b") as opened:
        opened.truncate(size)


SPOILT: dict[str, tuple[str, Callable[[Path], object]]] = {
    "weights cut short": ("model.safetensors", lambda file: cut(file, file.stat().st_size - 100_000)),
    "a header of 2**64 bytes": (
        "model.safetensors",
        lambda file: file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:]),
    ),
    "a config that is no JSON": ("config.json", lambda file: file.write_text("{")),
    "a tokenizer that is no JSON": ("tokenizer.json", lambda file: file.write_text("[1,")),
}


@pytest.mark.parametrize("damage", list(SPOILT))
def test_b83_a_spoilt_model_folder_is_refused_at_the_start(tiny: Path, tmp_path: Path, damage: str) -> None:
    """An exit code other than 0, and a line that names the file. Each kind of damage to weights: see test_weights."""
    name, spoil = SPOILT[damage]
    folder = Path(shutil.copytree(tiny, tmp_path / "spoilt"))
    spoil(folder / name)
    server = Server(f"model={folder}", "kv_cache_num_tokens=4096")
    with pytest.raises(ServerEnded) as ended, server:
        pass
    assert server.process.returncode not in (0, None)
    assert name in str(ended.value).splitlines()[-1]
    assert "Traceback" not in str(ended.value)


def test_a_worker_started_by_hand_joins(tiny: Path) -> None:
    """`workers=manual` prints a line, and typing it is enough."""
    control = f"tcp://127.0.0.1:{_free_port()}"
    server = Server(f"model={tiny}", "kv_cache_num_tokens=4096", "workers=manual", f"control={control}")
    line = server.lines_until(re.compile(r"start it with: python (-m workers .*)"))[1]
    with subprocess.Popen([sys.executable, *line.split()], stderr=subprocess.DEVNULL) as worker:
        with server, client(server) as openai:
            assert openai.completions.create(model="tiny", prompt="go", max_tokens=3).usage
        assert worker.wait(30) == 0
    assert server.process.returncode == 0


def test_a_log_for_machines_has_no_secrets(tiny: Path, tmp_path: Path) -> None:
    """With log_format=json every line on stderr, the worker's and those of the start and the end included, is an object
    with its time; at the finest level none holds a prompt, an answer or a key, nor does the banner."""
    keys = tmp_path / "keys"
    keys.write_text("sk-very-secret\n")
    words = [f"model={tiny}", "kv_cache_num_tokens=4096", "log_level=debug", "log_format=json", f"api_key_file={keys}"]
    with (
        Server(*words) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="sk-very-secret", max_retries=0, timeout=60) as openai,
    ):
        for stream in (False, True):
            answer = openai.completions.create(
                model="tiny", prompt="PROMPTED", max_tokens=5, stream=stream, extra_headers={"x-request-id": "mine-7"}
            )
            if stream:
                list(answer)
        with pytest.raises(AuthenticationError):
            openai.with_options(api_key="sk-wrong").models.list()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert server.process.stdout
        said, log = server.process.stdout.read(), server.log
    lines = [json.loads(line) for line in log.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert any(line["logger"] == "worker" and line.get("rank") == 0 for line in lines)
    assert any("once more ends at once" in line["message"] for line in lines)
    answered = [line["status"] for line in lines if line.get("request_id") == "mine-7" and "status" in line]
    assert answered == [200, 200]
    assert [secret for secret in ("PROMPTED", "sk-very-secret", "sk-wrong") if secret in log + said] == []


def test_a_port_in_use_is_one_line_before_anything_is_loaded(tiny: Path) -> None:
    """The model is not even looked for."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError) as caught:
            listen("127.0.0.1", port)
    assert str(caught.value).startswith(f"port {port} on 127.0.0.1 is in use; ")


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("model=/nowhere", "model=/nowhere: no such folder"),
        ("max_model_len=999999", "max_model_len=999999 is more than"),
        ("tokenizer=/nowhere", "model=/nowhere: no such folder"),
        ("api_key_file=/nowhere", "api_key_file=/nowhere: No such file"),
        ("tls_cert=/nowhere", "tls_key=… is missing"),
        ("host=0.0.0.0", "host=0.0.0.0 serves everybody who reaches this machine"),
        ("uds=/nowhere/toka.sock", "cannot serve on uds=/nowhere/toka.sock"),
    ],
)
def test_a_start_that_fails_is_one_line(tiny: Path, option: str, line: str) -> None:
    """It says what to do, without a traceback, and leaves no process behind. A wrong option is exit code 2."""
    options = [option] if option.startswith("model=") else [f"model={tiny}", option]
    server = Server(*options)
    with pytest.raises(ServerEnded) as ended, server:
        pass
    wrong = option.startswith(("max_model_len", "api_key_file", "tls_cert", "host"))
    assert server.process.returncode == (2 if wrong else 1)
    assert str(ended.value).startswith(f"toka: {line}")
    assert str(ended.value).count("\n") == 1


def test_an_address_that_is_not_ours_is_one_line() -> None:
    """Neither a host without a name nor one of another machine can be listened on."""
    for host in ("no.such.host.invalid", "192.0.2.1"):
        with pytest.raises(StartError, match=f"cannot serve on host={host} port=0"):
            listen(host, 0)


def test_a_model_goes_by_what_was_typed(tiny: Path) -> None:
    """An option, else the hub id, else the folder's last part; the folder's own name works too."""
    folder = ModelFolder.load(tiny)
    assert model_names(Config(model=str(tiny)), folder) == ["tiny"]
    assert model_names(Config(model="org/tiny"), folder) == ["org/tiny", "tiny"]
    assert model_names(Config(model=str(tiny), served_model_name="small"), folder) == ["small"]


def test_the_banner_can_be_pasted() -> None:
    """An address that means everywhere is none to connect to."""
    shown = banner("tiny", "http://0.0.0.0:10210", 4096, 2048, Config())
    assert "toka 0" in shown
    assert "KV cache: 4,096 tokens; longest prompt and answer: 2,048 tokens" in shown
    assert "curl http://127.0.0.1:10210/v1/chat/completions" in shown
    assert "authorization" not in shown
    shown = banner("tiny", "https://localhost", 4096, 2048, Config(uds="/run/my toka", api_key="sk-a"))
    assert "serves tiny at https://localhost/v1 on /run/my toka" in shown
    assert "curl --unix-socket '/run/my toka' https://localhost/v1/chat/completions" in shown
    assert "authorization: Bearer YOUR_KEY" in shown
    assert "sk-a" not in shown


async def test_a_client_that_does_not_read_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The end waits a while for answers to be taken, then hangs up: no traceback, and no wait without an end."""
    monkeypatch.setattr("toka.serve.FLUSH", 0.2)
    answering = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        answering.set()
        for _ in range(64):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})

    listener = listen("127.0.0.1", 0)
    with socket.create_connection(listener.getsockname()) as client:
        async with asyncio.timeout(5):
            async with _answering(Http(app), listener):
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await answering.wait()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_of_many_failures_the_deliberate_one_is_shown() -> None:
    """A task group wraps what its tasks raise; a fault of ours keeps everything."""
    known, fault = StartError("the worker is gone"), ZeroDivisionError()
    assert _reason(ExceptionGroup("", [ExceptionGroup("", [known]), ConfigError("late")])) is known
    both = ExceptionGroup("", [known, fault])
    assert _reason(both) is both


def _wait_for(server: Server, text: str) -> None:
    while text not in server.log:
        assert server.process.poll() is None
        time.sleep(0.02)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
