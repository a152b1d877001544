"""Several tenants in one simulation."""

import numpy as np
import pytest

from tests.sim.test_run import ONE, SMALL, setup, simulate
from toka.errors import ConfigError
from toka.screen import Screen
from toka.sim import command
from toka.sim.tenants import Tenant, owned, tenant_lines, tenants_of
from toka.sim.workload import Asked, synthetic


def test_tenants_are_named_with_their_requests() -> None:
    """And perhaps a weight, or the batch lane."""
    assert tenants_of("a:3, b:4:0.5,c:5:batch") == [
        Tenant("a", 3),
        Tenant("b", 4, 0.5),
        Tenant("c", 5, 1.0, batch=True),
    ]


@pytest.mark.parametrize("text", ["", "a", "a:0", ":3", "a:3:0", "a:3:many", "a:3,a:4", "a:3:inf"])
def test_what_names_no_tenants_is_refused(text: str) -> None:
    """In one line that says what would."""
    with pytest.raises(ConfigError, match="tenants="):
        tenants_of(text)


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_few_requests_do_not_wait_behind_many(replicas: int) -> None:
    """Though they come last: they have started when most of the others have not."""
    tenants = [Tenant("many", 2000), Tenant("few", 10)]
    workload = owned(synthetic(ONE, Asked(10), 2010, seed=1), tenants)
    simulation, _ = simulate(workload, setup(workload, replicas=replicas))
    meter = simulation.meter
    assert meter.first[2000:].max() < np.quantile(meter.first[:2000], 0.1)
    rows = tenant_lines(simulation)
    assert [row.split()[0] for row in rows] == ["tenant", "many", "few"]


def test_weights_share_the_device_out() -> None:
    """A tenant with weight 3 gets about three times the tokens of the other, as long as both have work."""
    tenants = [Tenant("a", 900, 3.0), Tenant("b", 900)]
    workload = owned(synthetic(SMALL, Asked(), 1800, seed=2), tenants)
    simulation, _ = simulate(workload, setup(workload)._replace(weights={"a": 3.0}))
    shares = {name: float(share.rstrip("%")) for name, _, share, *_ in map(str.split, tenant_lines(simulation)[1:])}
    assert shares["a"] / shares["b"] == pytest.approx(3, rel=0.15)


def test_the_command_has_a_line_a_tenant(capsys: pytest.CaptureFixture[str]) -> None:
    """Below the table; the batch lane behind the others, though it came first."""
    command.main(["tenants=night:200:batch,day:200", "num_blocks=2000", "max_seqs_per_forward=32"], Screen())
    *_, night, day = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (night[0], day[0]) == ("night", "day")
    assert float(night[3].replace(",", "")) > 2 * float(day[3].replace(",", ""))


@pytest.mark.parametrize("words", [["requests=3"], ["workload=trace", "trace=x.jsonl"]])
def test_tenants_say_how_many_requests_there_are(words: list[str]) -> None:
    """So nothing else may."""
    with pytest.raises(ConfigError, match="tenants="):
        command.main(["tenants=a:3", *words], Screen())
