"""What a person sees: lines, and bars while something takes long. Everything that toka prints goes through here."""

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

MEGABYTE = 1_000_000


class Screen:
    """Lines on stdout, complaints and progress on stderr. Bars where stderr is a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}
        self._line: Callable[[str], str] | None = None

    def log_as(self, line: Callable[[str], str]) -> None:
        """From now on complaints and progress are lines as `line` makes them, and never bars."""
        self._line = line

    def line(self, text: str) -> None:
        """A line that somebody asked for."""
        self.write(f"{text}\n")

    def write(self, text: str) -> None:
        """Text as it comes, shown at once; to nobody, if who read it has gone, as `head` does when it has enough."""
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)

    def complain(self, text: str) -> None:
        """What went wrong, or what else is not part of the output."""
        self.finish()
        sys.stderr.write(f"{self._line(text) if self._line else f'toka: {text}'}\n")
        sys.stderr.flush()

    def progress(self, phase: str, done: int, total: int) -> None:
        """How far `phase` has come, in bytes or steps. It ends, once, when `done` reaches `total`."""
        started = self._started.get(phase)
        if started == -1 or total <= 0:
            return
        if started is None:
            started = self._started[phase] = time.monotonic()
            self._begin(phase, total)
        if self._bars is not None:
            self._bars.update(self._tasks[phase], completed=done, total=total)
        if done >= total:
            self._started[phase] = -1
            self._end(phase, time.monotonic() - started)

    def finish(self) -> None:
        """Leave no bar behind, whatever has not ended."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _begin(self, phase: str, total: int) -> None:
        size = f" ({total / MEGABYTE:.1f} MB)" if total >= MEGABYTE else ""
        if self._line or not sys.stderr.isatty():
            self.complain(f"{phase}{size} …")
            return
        if self._bars is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._bars = Progress(*columns, console=Console(stderr=True))
            self._bars.start()
        self._tasks[phase] = self._bars.add_task(f"{phase}{size}", total=total)

    def _end(self, phase: str, seconds: float) -> None:
        if self._bars is None:
            self.complain(f"{phase}: done in {seconds:.1f} s")
        elif all(start == -1 for start in self._started.values()):
            self.finish()
