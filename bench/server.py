"""`python -m toka serve` as a child process, ready when the block is entered and gone when it is left."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from toka.launch import PACKAGES

READY = re.compile(r"serves (\S+) at (https?://\S+)/v1")
PATIENCE = 60.0
"""Seconds that the server has to end once it was asked to."""


class ServerEnded(Exception):
    """It ended before it was ready; the text is all that it said on stderr."""


class Server:
    """A server on a free port, with these options. `TOKA_…` variables of the caller do not reach it."""

    url = ""
    """Such as http://127.0.0.1:41235."""
    model = ""
    """What the model is called in the API."""

    def __init__(self, *options: str) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="toka-", suffix=".log")  # noqa: SIM115 - `_close` closes it
        variables = {name: value for name, value in os.environ.items() if not name.startswith("TOKA_")}
        if "TOKA_CACHE" in os.environ:
            variables["TOKA_CACHE"] = os.environ["TOKA_CACHE"]
        # `PACKAGES` need not be installed for this, and the current folder cannot hide it.
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "toka", "serve", "port=0", *options],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> Self:
        self.lines_until(READY)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.wait()
        # How busy the device was belongs beside any figure; workers say so with log_level=info.
        sys.stderr.writelines(f"{line}\n" for line in self.log.splitlines() if " s of work, " in line)
        self._close()

    @property
    def log(self) -> str:
        """All that was written to stderr so far, by the server and by its worker."""
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def lines_until(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Read stdout until a line fits. Raises ServerEnded, and then there is nothing left to clean up."""
        assert self.process.stdout
        for line in self.process.stdout:
            if ready := READY.search(line):
                self.model, self.url = ready.groups()
            if found := pattern.search(line):
                return found
        self.wait()
        log = self.log
        self._close()
        raise ServerEnded(log)

    def wait(self) -> int:
        """The exit code. A server that does not end in time is killed."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _close(self) -> None:
        assert self.process.stdout
        self.process.stdout.close()
        self._log.close()
