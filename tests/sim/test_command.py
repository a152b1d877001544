"""`toka simulate`."""

import sys
from pathlib import Path

import pytest

from toka.errors import ConfigError
from toka.screen import Screen
from toka.sim import command
from toka.sim.cost import Costs, Measured, fit
from toka.sim.report import ROWS

FEW = ["requests=30", "num_blocks=400", "max_tokens=None"]


def main(words: list[str]) -> None:
    """`toka simulate` with these options."""
    command.main(words, Screen())


def test_the_policies_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    """`admission=all`: a column each, and a row for each figure, under a line that says what was simulated."""
    main([*FEW, "admission=all", "seed=3"])
    headline, columns, *rows = capsys.readouterr().out.splitlines()
    assert "30 requests" in headline
    assert "spread=0.5, seed=3; 1 × 400 blocks of 16" in headline
    assert columns.split() == ["predicted", "reserved", "greedy"]
    assert [row[: len(label)] for row, label in zip(rows, ROWS, strict=True)] == list(ROWS)


def test_what_is_printed_depends_on_the_seed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """But for the wall time, which is the last line."""
    printed = []
    for _ in range(2):
        main([*FEW, "rate=50", "replicas=2"])
        printed.append(capsys.readouterr().out.splitlines()[:-1])
    assert printed[0] == printed[1]
    main([*FEW, "rate=50", "replicas=2", "seed=1"])
    assert capsys.readouterr().out.splitlines()[:-1] != printed[0]


def test_a_trace_brings_its_own_arrivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two requests ten seconds apart."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f'{{"arrival": {at}, "input_tokens": 9, "output_tokens": 2}}\n' for at in (0, 10)))
    main(["workload=trace", f"trace={path}"])
    out = capsys.readouterr().out
    assert "2 requests, as traced" in out
    assert ["simulated", "time,", "s", "10.00"] in [line.split() for line in out.splitlines()]


def test_costs_are_fitted_to_measured_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`fit=FILE` prints a file for `costs=`."""
    path = tmp_path / "steps.jsonl"
    path.write_text('{"seconds": 0.001, "rows": 1}\n{"seconds": 0.002, "rows": 101}\n')
    main([f"fit={path}"])
    costs = tmp_path / "costs.toml"
    costs.write_text(capsys.readouterr().out)
    assert Costs.load(str(costs)).row == pytest.approx(1e-5)
    assert Costs.load(str(costs)).step == pytest.approx(fit([Measured(0.001, 1), Measured(0.002, 101)]).step, rel=1e-3)


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    """With their defaults."""
    main(["--help"])
    out = capsys.readouterr().out
    assert "costs=h200-1b" in out
    assert "admission=predicted" in out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["rate=1", "concurrency=2"], "give one of them"),
        (["workload=trace"], "go together"),
        (["trace=x"], "go together"),
        (["workload=trace", "trace=x", "n=2"], "do not go with a trace"),
        (["num_block=3"], "did you mean num_blocks"),
        (["num_blocks=3"], "num_blocks"),
        (["costs=none.toml"], "none.toml"),
    ],
)
def test_wrong_options_are_refused(words: list[str], complaint: str) -> None:
    """In a line that says what to do."""
    with pytest.raises(ConfigError, match=complaint):
        main(words)


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is simulated."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'toka\[plot\]'"):
        main([f"plot={tmp_path / 'x.png'}"])


def test_a_picture_needs_a_folder(tmp_path: Path) -> None:
    """Said before anything is simulated."""
    with pytest.raises(ConfigError, match="no folder"):
        main([*FEW, f"plot={tmp_path / 'nowhere' / 'x.png'}"])


def test_seconds_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A PNG with a line for each policy."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    main([*FEW, "admission=all", "rate=10", f"plot={path}"])
    assert path.read_bytes().startswith(b"\x89PNG")
