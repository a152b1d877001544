"""The cost model: what a step takes, and how measured steps become one."""

import tomllib
from pathlib import Path

import msgspec
import pytest

from toka.errors import ConfigError
from toka.sim.cost import Costs, Measured, Work, fit, measured

COSTS = Costs(step=1e-3, row=2e-6, kv_token=1e-8, prefill_token=3e-6, prefill_pair=1e-9)
STEPS = [
    Work(1, 100, 0, 0),
    Work(64, 64 * 900, 0, 0),
    Work(256, 256 * 200, 0, 0),
    Work(0, 0, 2048, 2048 * 1024),
    Work(0, 0, 8192, 8192 * 100),
    Work(128, 128 * 500, 512, 512 * 256),
]


def test_a_step_takes_the_sum_of_what_it_does() -> None:
    """Each kind of work has a price, and the step itself one too."""
    assert COSTS.seconds(Work()) == 1e-3
    assert COSTS.seconds(Work(10, 1000, 100, 5000)) == pytest.approx(1e-3 + 20e-6 + 10e-6 + 300e-6 + 5e-6)


def test_fitting_finds_the_costs_that_made_the_steps() -> None:
    """Steps without noise give their costs back."""
    found = fit([Measured(COSTS.seconds(work), *work) for work in STEPS])
    for name in ("step", "row", "kv_token", "prefill_token", "prefill_pair"):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), rel=1e-6)


def test_no_fitted_cost_is_negative() -> None:
    """Where noise asks for a negative cost, that kind of work is free."""
    steps = [Measured(1e-3, rows=1, kv_tokens=1000), Measured(1.1e-3, rows=100, kv_tokens=100)]
    steps += [Measured(0.9e-3, rows=1, kv_tokens=100_000)]
    found = fit(steps)
    assert found.kv_token == 0
    assert found.row > 0
    assert found.prefill_token == 0, "no step prefilled"


def test_nothing_can_be_fitted_to_no_steps() -> None:
    """Said in a line."""
    with pytest.raises(ConfigError, match="no measured steps"):
        fit([])


def test_costs_survive_their_file(tmp_path: Path) -> None:
    """What `toml` writes, `load` reads."""
    path = tmp_path / "mine.toml"
    path.write_text(COSTS.toml())
    assert Costs.load(str(path)) == COSTS
    assert set(tomllib.loads(COSTS.toml())) == set(Costs.__struct_fields__)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("step = -1", "step"),
        ("step = 1e-3\nstep = 2", "overwrite"),
        (COSTS.toml() + "rows = 1", "rows"),
        ("row = 1e-6", "step"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    """Negative, repeated, unknown or missing figures; the message names the file and the figure."""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"costs=.*mine\.toml.*{complaint}"):
        Costs.load(str(path))


def test_a_name_that_is_no_file_is_told_what_there_is() -> None:
    """Those that come with toka are listed."""
    with pytest.raises(ConfigError, match="h200-1b"):
        Costs.load("h100")


@pytest.mark.parametrize(
    ("batch", "context", "milliseconds"),
    [(1, 256, 1.246), (1, 1024, 1.258), (16, 1024, 1.499), (64, 1024, 1.998), (256, 1024, 4.276), (1024, 512, 10.74)],
)
def test_the_h200_decodes_as_measured(batch: int, context: int, milliseconds: float) -> None:
    """Whole decode steps of the 1B shape come out within 12 % of what was measured."""
    seconds = Costs.load("h200-1b").seconds(Work(batch, batch * context))
    assert 1000 * seconds == pytest.approx(milliseconds, rel=0.12)


def test_measured_steps_are_read_from_lines(tmp_path: Path) -> None:
    """One JSON object a line; what is left out is none."""
    path = tmp_path / "steps.jsonl"
    path.write_bytes(msgspec.json.encode(Measured(0.5, rows=3)) + b'\n{"seconds": 1, "prefill_tokens": 7}\n')
    assert measured(path) == [Measured(0.5, rows=3), Measured(1.0, prefill_tokens=7)]


@pytest.mark.parametrize("line", ['{"rows": 1}', '{"seconds": 0}', '{"seconds": 1, "row": 2}', "seconds"])
def test_a_line_that_is_no_measured_step_is_refused(tmp_path: Path, line: str) -> None:
    """In one line that names the file."""
    path = tmp_path / "steps.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=r"steps\.jsonl"):
        measured(path)
