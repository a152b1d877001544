"""The worker processes that the server starts by itself, on its own machine."""

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import Self

from toka.errors import StartError

PACKAGES = Path(__file__).resolve().parent.parent
"""The folder that holds both `toka` and `workers`. Workers run in it, so that another `workers` nearby is not taken."""

INSIST = 3.0
"""Seconds that a worker has to leave once it was asked to by a signal."""


class LocalWorker:
    """One worker process. It leaves when told to by the engine, or when its stdin closes because the server is gone.

    It has a session of its own: Ctrl-C in a terminal reaches the server alone, which lets running requests end.
    """

    __slots__ = ("_process",)

    def __init__(self, process: Process) -> None:
        self._process = process

    def __repr__(self) -> str:
        return f"<LocalWorker pid={self._process.pid} code={self._process.returncode}>"

    @classmethod
    async def start(cls, control: str, *options: str) -> Self:
        """Start a worker that joins the engine at `control`. Raises StartError."""
        command = [sys.executable, "-m", "workers", f"engine={control}", "parent=stdin", *options]
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, cwd=PACKAGES, start_new_session=True
            )
        except OSError as error:
            raise StartError(f"cannot start {' '.join(command)}: {error.strerror or error}") from None
        return cls(process)

    @property
    def pid(self) -> int:
        """The process's id, also after its end."""
        return self._process.pid

    async def ended(self) -> str:
        """Wait for the end of the process. How it ended, in words."""
        code = await self._process.wait()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}" + _hint(-code)
        return f"ended with code {code}"

    async def stop(self, grace: float = 10.0) -> None:
        """Wait `grace` seconds for the process to end by itself, then ask it to, then make it. Safe to repeat."""
        for insist in (self._process.terminate, self._process.kill):
            if self._process.returncode is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), grace)
            if self._process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError):  # it has just ended, and nobody has been told yet
                insist()
            grace = INSIST
        await self._process.wait()


def manual_command(control: str) -> str:
    """What a person types to start a worker by hand."""
    return f"python -m workers engine={control}"


def _hint(number: int) -> str:
    return "; perhaps the machine ran out of memory (kv_cache_num_tokens=… asks for less)" if number == 9 else ""
