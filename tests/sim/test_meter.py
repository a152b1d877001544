"""What a simulation measures."""

import numpy as np
import pytest

from toka.sim.meter import Histogram, Meter, State


def numbers(*items: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array(items, dtype=np.int64)


def test_percentiles_of_gaps_are_right_to_half_a_percent() -> None:
    """Against sorting them all."""
    gaps = np.random.default_rng(0).lognormal(-5, 1, 10_000)
    histogram = Histogram()
    for some in np.split(gaps, 100):
        histogram.add(some)
    for share in (0.5, 0.9, 0.99):
        assert histogram.quantile(share) == pytest.approx(np.quantile(gaps, share), rel=0.005)


def test_equal_gaps_count_as_often_as_they_come() -> None:
    """The short cut for rows that waited equally long loses none, nor those that did not."""
    histogram = Histogram()
    histogram.add(np.array([0.25, 0.25, 0.5, 0.25, 0.125]))
    assert histogram.counts.sum() == 5
    assert histogram.counts.max() == 3


def test_no_gaps_have_no_percentiles() -> None:
    """Zero, as when every answer has one token."""
    assert Histogram().quantile(0.5) == 0


def test_the_first_token_of_a_sequence_is_no_gap() -> None:
    """It sets `first`; later ones are gaps since the one before."""
    meter = Meter(3)
    meter.sampled(1.0, numbers(0, 1))
    meter.sampled(1.5, numbers(1, 2))
    meter.sampled(1.75, numbers(0, 1, 2))
    assert meter.first.tolist() == [1.0, 1.0, 1.5]
    assert meter.tokens == 7
    assert meter.gaps.counts.sum() == 4


def test_use_is_weighed_by_time() -> None:
    """A state counts for as long as it lasts, second by second."""
    meter = Meter(1)
    meter.change(State(), State(used=10, running=1, waiting=2))
    meter.advance(0.5)
    meter.change(State(used=10, running=1, waiting=2), State(used=30, running=2, waiting=1))
    meter.advance(3.25)
    series = meter.series()
    assert series.used.tolist() == [20, 30, 30]
    assert series.running.tolist() == [1.5, 2, 2]
    assert series.waiting.tolist() == [1.5, 1, 1]


def test_the_state_is_that_of_all_replicas() -> None:
    """Each of them reports what changed for it alone."""
    meter = Meter(1)
    meter.change(State(), State(5, 1, 0))
    meter.change(State(), State(7, 2, 1))
    meter.change(State(5, 1, 0), State(0, 0, 0))
    assert meter.state == State(7, 2, 1)


def test_a_second_is_loaded_if_somebody_always_waited() -> None:
    """A moment with an empty queue, and it is not."""
    meter = Meter(1)
    waiting, none = State(1, 1, 1), State(1, 1, 0)
    meter.change(State(), waiting)
    meter.advance(1.5)
    meter.change(waiting, none)
    meter.advance(1.6)
    meter.change(none, waiting)
    meter.advance(3.5)
    assert meter.series().loaded.tolist() == [True, False, True]
