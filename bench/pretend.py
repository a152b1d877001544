"""A real server whose worker has no model: all that the engine does, at the pace that is asked for."""

import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread

from bench.server import READY, Server
from tests.fakes import write_tiny_model
from toka.launch import PACKAGES

JOIN = re.compile(r"engine=(\S+)")
ASCII = 128
"""A worker that samples ids below it makes text at once of each, by a tokenizer of bytes."""


@contextmanager
def serving(
    step_ms: float, *options: str, vocab_size: int = ASCII, num_blocks: int = 65536, max_len: int = 4096
) -> Iterator[Server]:
    """A server, with more options, and a worker whose steps take so long. `max_len`: the model's context."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toka-bench-")))
        write_tiny_model(folder / "tiny", weights=False, max_position_embeddings=max_len)
        server = Server(
            f"model={folder / 'tiny'}",
            "load_format=dummy",
            "workers=manual",
            f"control=tcp://127.0.0.1:{free_port()}",
            "log_level=warning",
            *options,
        )
        joining = server.lines_until(JOIN)
        command = [sys.executable, "-m", "toka.sim.worker", f"engine={joining[1]}"]
        words = [f"step_ms={step_ms}", f"num_blocks={num_blocks}", f"vocab_size={vocab_size}"]
        worker = subprocess.Popen([*command, *words], cwd=PACKAGES)
        stack.callback(worker.wait)
        stack.callback(worker.terminate)
        stack.push(server.__exit__)

        def outlive() -> None:
            worker.wait()
            server.process.terminate()

        # A server would wait for ever for a worker that could not start.
        Thread(target=outlive, daemon=True).start()
        server.lines_until(READY)
        yield server


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
