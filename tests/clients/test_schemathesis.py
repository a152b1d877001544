"""schemathesis, as its command line runs it: requests made of /openapi.json, and answers held to it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.engine import Engine, loading


@pytest.fixture
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A server whose answers take no time, and are short: what matters is what is said of requests."""
    with loading(tmp_path_factory.mktemp("quick"), 0, "max_model_len=128") as engine:
        engine.wait_ready()
        yield engine


def run(engine: Engine, folder: Path, *words: str) -> None:
    """Every check but one: a body may fit its schema and still ask for what two of its fields cannot have together."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{engine.url}/openapi.json"]
    command += ["--exclude-checks", "positive_data_acceptance", "--warnings", "off", "--seed", "1", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "Tested: " in done.stdout


def test_it_finds_nothing(quick: Engine, tmp_path: Path) -> None:
    """Thousands of requests, each a step inside or outside of what the document allows. The bulk endpoint once only."""
    run(quick, tmp_path, "--phases", "coverage", "--exclude-path", "/custom/synchronous-batch-completions")


@pytest.mark.slow
def test_it_finds_nothing_at_random(quick: Engine, tmp_path: Path) -> None:
    """The same, and random bodies and sequences."""
    run(quick, tmp_path, "--max-examples", "100")
