"""A load generator as a command: its options, its help, and what it says when it cannot go on."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from bench.clients import Health
from bench.dataset import Request
from bench.flags import parse
from bench.messages import Answer
from bench.metrics import errors, miscounted
from bench.server import ServerEnded
from bench.target import Reached
from toka.errors import ConfigError, TokaError
from toka.options import help_lines

S = TypeVar("S", bound=Struct)

SHOWN = 3
"""Lines of a kind that are shown."""


def command(
    about: str, struct: type[S], run: Callable[[S], int], several: frozenset[str] = frozenset({"header"})
) -> int:
    """Run with the options of the command line; returns the exit code: 2 for wrong options, 1 for what failed."""
    words = sys.argv[1:]
    if {"--help", "-h"} & set(words):
        show(about)
        show("\n".join(help_lines(struct)))
        return 0
    try:
        return run(parse(struct, words, several))
    except (TokaError, ServerEnded, OSError) as error:
        complain(f"bench: {error}")
        return 2 if isinstance(error, ConfigError) else 1


def verdict(requests: Sequence[Request], answers: Sequence[Answer], health: Health, *, exact: bool) -> int:
    """Say on stderr what was wrong; returns the exit code: 1 if a request failed or a count is not what it must be."""
    found = errors(answers)
    for reason, many in list(found.items())[:SHOWN]:
        complain(f"{many} failed: {reason}")
    if any("vocab" in reason for reason in found):
        complain("give the number of ids that the model knows as vocab_size=…")
    asked = [
        (len(one.prompt) if isinstance(one.prompt, list) else None, one.output_len * one.n if exact else None)
        for one in requests
    ]
    wrong = miscounted(asked, answers)
    for line in wrong[:SHOWN]:
        complain(f"WRONG COUNT: {line}")
    if len(wrong) > SHOWN:
        complain(f"… and {len(wrong) - SHOWN} more wrong counts")
    if health.warning:
        complain(health.warning)
    return 1 if found or wrong else 0


def facts(server: Reached, health: Health, answers: Sequence[Answer]) -> dict[str, object]:
    """What a result says besides its figures, as far as it is known."""
    known: dict[str, object] = {"engine_version": server.version, "git_sha": _git_sha()}
    return {name: value for name, value in known.items() if value is not None} | {
        "num_clients": health.clients,
        "client_cpu_busy": round(health.busy, 4),
        "client_lag_ms_p99": round(1000 * health.lag, 3),
        "client_was_bottleneck": health.warning is not None,
        "error_breakdown": errors(answers),
    }


def stamp() -> str:
    """The time now, as vLLM's file names have it."""
    return time.strftime("%Y%m%d-%H%M%S")


def save(path: Path, result: dict[str, object], append: bool = False) -> None:
    """Write a result as JSON, or append it as one line. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab" if append else "wb") as file:
        file.write(msgspec.json.encode(result) + b"\n")


def show(text: str) -> None:
    """Print."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """Print on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _git_sha() -> str | None:
    """Of this checkout, if it is one."""
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
