"""`python -m toka serve` of this checkout, run by the engine's environment, for a client that lives in another one."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
READY = re.compile(r"serves (\S+) at (http://\S+)/v1")
PATIENCE = 60.0
"""Seconds that the server has to end."""


@dataclass(frozen=True)
class Engine:
    """A server that is ready."""

    model: str
    url: str
    folder: Path
    """The model's."""

    @property
    def base_url(self) -> str:
        """What OpenAI's clients are given."""
        return f"{self.url}/v1"

    def status(self, path: str) -> int:
        """The status of a GET; 0 if nobody listens."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                status: int = answer.status
                return status
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def wait_ready(self) -> None:
        """Until a request would start."""
        while self.status("/ready") != 200:
            time.sleep(0.05)

    def post(self, path: str, **body: object) -> Any:
        """The answer to a POST, without any client."""
        data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=60) as answer:
            return json.load(answer)

    def text(self, prompt: str, **body: object) -> Any:
        """The one choice of a completion."""
        return self.post("/v1/completions", prompt=prompt, **body)["choices"][0]

    def chat(self, prompt: str, **body: object) -> str:
        """What the assistant answers."""
        messages = [{"role": "user", "content": prompt}]
        content: str = self.post("/v1/chat/completions", messages=messages, **body)["choices"][0]["message"]["content"]
        return content


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Engine]:
    """A tiny model of random weights, written to `folder` and served on a free port with these options."""
    write_model(folder)
    with started(folder, "port=0", *options) as process:
        yield Engine(*until_ready(process, folder), folder)


@contextmanager
def loading(folder: Path, seconds: float, *options: str) -> Iterator[Engine]:
    """A server that answers 503 for so many seconds; then its model, a pretended one, is there."""
    write_model(folder, weights=False)
    port, control = free_port(), f"tcp://127.0.0.1:{free_port()}"
    manual = (f"port={port}", "workers=manual", f"control={control}", "served_model_name=tiny", "load_format=dummy")
    with started(folder, *manual, *options) as process:
        engine = Engine("tiny", f"http://127.0.0.1:{port}", folder)
        while engine.status("/ready") != 503:
            assert process.poll() is None, "the server has ended"
            time.sleep(0.05)
        command = f"sleep {seconds} && exec {shlex.quote(engine_python())} -m toka.sim.worker engine={control}"
        worker = subprocess.Popen(["sh", "-c", f"{command} vocab_size=259"], env=variables(), cwd=folder)
        try:
            yield engine
        finally:
            worker.terminate()
            worker.wait()


@contextmanager
def started(folder: Path, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """The server's process. It ends well, and without a traceback."""
    log = folder / "server.log"
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            [engine_python(), "-m", "toka", "serve", f"model={folder}", *options],
            env=variables(),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
    said = log.read_text(encoding="utf-8")
    assert process.returncode == 0, said
    assert "Traceback" not in said, said


def until_ready(process: "subprocess.Popen[str]", folder: Path) -> tuple[str, str]:
    """The model's name and the server's address, once it says so."""
    assert process.stdout
    for line in process.stdout:
        if found := READY.search(line):
            return found[1], found[2]
    raise AssertionError((folder / "server.log").read_text(encoding="utf-8"))


def write_model(folder: Path, *, weights: bool = True) -> None:
    """Have the engine's environment write a tiny model."""
    program = "import sys; from pathlib import Path; from tests.fakes import write_tiny_model; "
    program += f"write_tiny_model(Path(sys.argv[1]), weights={weights})"
    subprocess.run([engine_python(), "-c", program, str(folder)], env=variables(), cwd=folder, check=True, timeout=120)


def variables() -> dict[str, str]:
    """The environment of the engine's processes: this one's, but for what was said to the client or to pytest."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOKA_", "PYTEST_"))}
    return kept | {"PYTHONPATH": str(ROOT)}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def engine_python() -> str:
    """The engine's environment, as ENGINE_PYTHON names it; this one if it does not."""
    python = os.environ.get("ENGINE_PYTHON", sys.executable)
    assert Path(python).is_file(), f"{python} is not there: `tox -e all --notest` makes the engine's environment"
    return python
