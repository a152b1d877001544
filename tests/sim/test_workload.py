"""Workloads: drawn lengths, arrivals, and traces."""

from pathlib import Path

import numpy as np
import pytest

from toka.errors import ConfigError
from toka.sim.workload import MONKEYS, SHAREGPT, Asked, Lognormal, Shape, replayed, synthetic

MANY = 20_000


def test_sharegpt_has_the_lengths_it_says() -> None:
    """Means and medians of the clipped distributions, within 5 %."""
    workload = synthetic(SHAREGPT, Asked(), MANY, seed=3)
    for lengths, mean, median, low, high in (
        (workload.own, 213, 108, 4, 2048),
        (workload.output, 201, 133, 4, 1024),
    ):
        assert lengths.mean() == pytest.approx(mean, rel=0.05)
        assert np.median(lengths) == pytest.approx(median, rel=0.06)
        assert lengths.min() >= low
        assert lengths.max() <= high


def test_sharegpt_of_seed_0_is_the_fixed_list() -> None:
    """2,000 requests have 425,971 tokens in and 401,498 out: the list that other engines were measured on."""
    workload = synthetic(SHAREGPT, Asked(), 2000, seed=0)
    assert workload.prompt_tokens == 425_971
    assert int(workload.outputs.sum()) == 401_498


def test_one_seed_one_workload() -> None:
    """The same seed draws the same, another one does not."""
    first, again, other = (synthetic(SHAREGPT, Asked(None), 50, seed) for seed in (1, 1, 2))
    assert (first.own == again.own).all()
    assert (first.limit == again.limit).all()
    assert (first.own != other.own).any()


def test_other_arrivals_leave_the_lengths_alone() -> None:
    """Each thing that is drawn has a generator of its own."""
    workload = synthetic(SHAREGPT, Asked(), MANY, seed=5)
    poisson = workload.arriving(rate=40.0, concurrency=None, seed=5)
    assert (poisson.output == workload.output).all()
    assert (np.diff(poisson.arrival) >= 0).all()
    assert np.diff(poisson.arrival).mean() == pytest.approx(1 / 40, rel=0.05)
    assert np.diff(poisson.arrival).std() == pytest.approx(1 / 40, rel=0.05), "exponential gaps"


def test_clients_ask_for_more_than_they_get() -> None:
    """Without a fixed max_tokens, it is a multiple of the longest sample that grows with the spread."""
    shape = SHAREGPT._replace(samples=4)
    for spread in (0.0, 1.0):
        workload = synthetic(shape, Asked(None, spread), 500, seed=0)
        longest = workload.output.reshape(500, 4).max(axis=1)
        assert (workload.limit > longest).all()
        if not spread:
            assert (workload.limit == 2 * longest).all()


def test_a_fixed_max_tokens_cuts_answers_off() -> None:
    """No sequence generates more than its request asked for."""
    workload = synthetic(SHAREGPT, Asked(100), 500, seed=0)
    assert workload.outputs.max() == 100
    assert workload.output.max() > 100


def test_prompts_of_a_group_begin_alike_and_go_on_differently() -> None:
    """The first `prefix` tokens are the group's, the next one is the request's alone."""
    shape = Shape(own=Lognormal(5, 0, 1, 9), output=Lognormal(5, 0, 1, 9), prefix=7, groups=2)
    workload = synthetic(shape, Asked(), 40, seed=0)
    prompts = [workload.prompt(request).tolist() for request in range(40)]
    assert {len(prompt) for prompt in prompts} == {12}
    assert len({tuple(prompt[:7]) for prompt in prompts}) == 2
    assert len({prompt[7] for prompt in prompts}) == 40


def test_prompts_without_a_prefix_have_nothing_in_common() -> None:
    """Not even their first token."""
    workload = synthetic(SHAREGPT, Asked(), 30, seed=0)
    assert len({int(workload.prompt(request)[0]) for request in range(30)}) == 30


def test_monkeys_sample_each_prompt_many_times() -> None:
    """64 samples, each of 200 tokens, of prompts of 1,120."""
    workload = synthetic(MONKEYS, Asked(), 3, seed=0)
    assert workload.samples == 64
    assert len(workload.output) == 3 * 64
    assert workload.prompt_tokens == 3 * 64 * 1120
    assert set(workload.outputs.tolist()) == {200}


def test_a_trace_is_replayed_in_order(tmp_path: Path) -> None:
    """By arrival, whatever the order of its lines; only so many as asked for."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival": 2.5, "input_tokens": 30, "output_tokens": 7, "max_tokens": 5}\n'
        '{"arrival": 0.5, "input_tokens": 10, "output_tokens": 3, "prefix_tokens": 4, "group": 9}\n'
        '{"arrival": 9, "input_tokens": 1, "output_tokens": 1}\n'
    )
    workload = replayed(path, Asked(64), requests=2, seed=0)
    assert workload.arrival.tolist() == [0.5, 2.5]
    assert workload.own.tolist() == [6, 30]
    assert workload.prefix.tolist() == [4, 0]
    assert workload.limit.tolist() == [64, 5]
    assert workload.outputs.tolist() == [3, 5]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "no requests"),
        ('{"arrival": 0, "input_tokens": 0, "output_tokens": 1}', "input_tokens"),
        ('{"arrival": 0, "input_tokens": 4, "output_tokens": 1, "prefix_tokens": 4}', "fewer"),
        ('{"arrival": 0, "input_tokens": 4, "output_tokens": 1, "tenant": 4}', "tenant"),
    ],
)
def test_a_wrong_trace_is_refused(tmp_path: Path, line: str, complaint: str) -> None:
    """In one line that names the file and the field."""
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=rf"trace\.jsonl.*{complaint}"):
        replayed(path, Asked(), None, seed=0)
