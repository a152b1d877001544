"""The commands as a person types them: what they print, and how they end."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from toka import cli
from toka.config import Config
from toka.errors import StartError
from toka.screen import Screen


def typed(command: str, *arguments: str) -> int:
    """The exit code of a command."""
    return cli.run(command, arguments)


class Answers(BaseHTTPRequestHandler):
    """A server that streams words, or refuses."""

    asked: ClassVar[dict[str, dict[str, object]]] = {}
    keys: ClassVar[set[str | None]] = set()
    """What the requests of the last client were authorized with."""
    events: ClassVar[list[str]] = []
    refusal: ClassVar[str | None] = None
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.keys.clear()
        self.keys.add(self.headers["authorization"])
        self.reply(200, json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]}))

    def do_POST(self) -> None:
        self.keys.add(self.headers["authorization"])
        self.asked[self.path] = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.refusal:
            self.reply(503, json.dumps({"error": {"message": self.refusal, "type": "server_error"}}))
        else:
            self.reply(200, "".join(f"{event}\n\n" for event in [*self.events, "data: [DONE]"]))

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def server(events: list[str], refusal: str | None = None) -> Iterator[tuple[str, type[Answers]]]:
    """`port=…` of a running server, and what it was asked."""

    class Handler(Answers):
        asked: ClassVar[dict[str, dict[str, object]]] = {}

    Handler.events, Handler.refusal = events, refusal
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"port={running.server_address[1]}", Handler
        finally:
            running.shutdown()
            thread.join()


def chunk(**choice: object) -> str:
    """An event with a piece of the answer."""
    return "data: " + json.dumps({"id": "1", "choices": [{"index": 0, "finish_reason": None, **choice}]})


def test_ping_prints_a_completion_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    """`toka-ping prompt='Hello world' max_tokens=100`."""
    with server([": a comment", chunk(text=" and"), chunk(text=" good night ✨")]) as (port, answers):
        assert typed("ping", "prompt=Hello world", "max_tokens=100", port) == 0
    assert capsys.readouterr().out == " and good night ✨\n"
    asked = {"prompt": "Hello world", "max_tokens": 100, "temperature": 0.0, "stream": True, "model": "tiny"}
    assert answers.asked == {"/v1/completions": asked}


def test_ping_chats(capsys: pytest.CaptureFixture[str]) -> None:
    """`chat=True` sends the prompt as a message."""
    with server([chunk(delta={"role": "assistant", "content": ""}), chunk(delta={"content": "Hi"})]) as (port, answers):
        assert typed("ping", "prompt=Hello", "chat=True", port) == 0
    assert capsys.readouterr().out == "Hi\n"
    assert answers.asked["/v1/chat/completions"]["messages"] == [{"role": "user", "content": "Hello"}]


def test_ping_without_a_server_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 1."""
    assert typed("ping", "port=1") == 1
    shown = capsys.readouterr().err
    assert shown.startswith("toka: no server answers at http://127.0.0.1:1 ")
    assert shown.count("\n") == 1


def test_ping_passes_on_what_the_server_says(capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal is shown in the server's words."""
    with server([], refusal="The model is not loaded yet.") as (port, _):
        assert typed("ping", port) == 1
    assert capsys.readouterr().err == "toka: The model is not loaded yet.\n"


def test_ping_notices_an_error_within_the_stream(capsys: pytest.CaptureFixture[str]) -> None:
    """A worker may die after the headers went out."""
    problem = "data: " + json.dumps({"error": {"message": "The worker is gone."}})
    with server([chunk(text="so"), problem]) as (port, _):
        assert typed("ping", port) == 1
    assert capsys.readouterr() == ("so", "toka: The worker is gone.\n")


def test_ping_takes_the_servers_address_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """TOKA_PORT moves the server and those who look for it; other options of the server do not disturb."""
    monkeypatch.setenv("TOKA_MODEL", "elsewhere")
    with server([chunk(text="so")]) as (port, _):
        monkeypatch.setenv("TOKA_PORT", port.removeprefix("port="))
        assert typed("ping") == 0


def test_ping_sends_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one it is given, or the first of TOKA_API_KEY, which may be the server's too; without one, none."""
    with server([chunk(text="so")]) as (port, answers):
        assert typed("ping", port) == 0
        assert answers.keys == {None}
        monkeypatch.setenv("TOKA_API_KEY", "sk-a, sk-b")
        assert typed("ping", port) == 0
        assert answers.keys == {"Bearer sk-a"}
        assert typed("ping", port, "api_key=sk-c") == 0
        assert answers.keys == {"Bearer sk-c"}


def test_download_prints_the_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """stdout holds the folder and nothing else, for use in scripts."""

    def locate(model: str, revision: str | None, progress: object) -> Path:
        return tmp_path / model / str(revision)

    monkeypatch.setattr("toka.hub.locate", locate)
    assert typed("download", "model=some", "revision=v1") == 0
    assert capsys.readouterr().out == f"{tmp_path}/some/v1\n"


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("srve", "did you mean serve?"),
        ("org/model", "write model=org/model"),
        ("plan", "not supported yet"),
        ("xyzzy", "toka --help lists them"),
    ],
)
def test_a_wrong_command_is_one_line(command: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and what was meant."""
    assert typed(command) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert hint in shown


@pytest.mark.parametrize("arguments", [["prot=1"], ["port=no"], ["tp_size=2"]])
def test_a_wrong_option_ends_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is loaded."""
    assert typed("serve", *arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_failed_start_ends_with_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, no traceback."""

    def fail(config: Config, screen: Screen) -> None:
        raise StartError("something is in the way; move it")

    monkeypatch.setattr("toka.serve.serve", fail)
    assert typed("serve") == 1
    assert capsys.readouterr().err == "toka: something is in the way; move it\n"


@pytest.mark.parametrize(
    "words", [["serve", "model=x"], ["model=x"], ["--model", "x"], ["--model=x"]], ids=lambda words: " ".join(words)
)
def test_serve_is_what_toka_does(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without its name, in every way to write an option."""
    served: list[str] = []
    monkeypatch.setattr("toka.serve.serve", lambda config, screen: served.append(config.model))
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert (served, ended.value.code) == (["x"], 0)


@pytest.mark.parametrize(("word", "shown"), [("--help", "toka serve"), ("-h", "toka serve"), ("--version", ".")])
def test_the_usual_questions_are_answered(word: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`toka --help` and `toka --version`, as with any other command."""
    with pytest.raises(SystemExit) as ended:
        cli.main([word])
    assert ended.value.code == 0
    assert shown in capsys.readouterr().out


def test_ctrl_c_during_the_start_ends_with_code_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody changed their mind; nothing failed."""

    def interrupted(config: Config, screen: Screen) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("toka.serve.serve", interrupted)
    assert typed("serve") == 0


@pytest.mark.parametrize("command", ["serve", "ping", "download"])
def test_every_command_lists_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` prints each field of the command's struct with its description."""
    assert typed(command, "--help") == 0
    shown = capsys.readouterr().out
    struct = {"serve": Config, "ping": cli.Ping, "download": cli.Download}[command]
    assert [name for name in struct.__struct_fields__ if f"  {name}=" not in shown] == []


def test_a_reader_who_leaves_is_no_error() -> None:
    """`toka serve --help | head -1` shows a line and nothing else."""
    command = [sys.executable, "-m", "toka", "serve", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_the_module_is_the_command() -> None:
    """`python -m toka version`, and nothing on stderr."""
    done = subprocess.run([sys.executable, "-m", "toka", "version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip().count(".") == 2
    assert done.stderr == ""


def test_progress_is_plain_lines_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    """One line when a phase begins and one when it ends, however often it is reported."""
    screen = Screen()
    for done in (0, 1_000_000, 2_000_000, 2_000_000):
        screen.progress("weights", done, 2_000_000)
    assert capsys.readouterr().err == "toka: weights (2.0 MB) …\ntoka: weights: done in 0.0 s\n"


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The bar is gone before a complaint is written."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    screen = Screen()
    screen.progress("download", 1, 2)
    screen.complain("no network")
    shown = capsys.readouterr().err
    assert "download" in shown
    assert shown.endswith("toka: no network\n")
    screen.finish()
