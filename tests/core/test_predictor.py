"""Predicted lengths: what is learned, from whom, and when."""

import numpy as np

from toka.core.blocks import Ints
from toka.core.predictor import Predictor


def ints(*numbers: int) -> Ints:
    return np.array(numbers, dtype=np.int32)


NONE = ints()


def test_nothing_known_means_all_of_it() -> None:
    """Before anything has ended, a sequence is taken to use all that it may."""
    assert Predictor().predict(0, 1000) == 1000


def test_what_ended_is_learned() -> None:
    """When answers use a fifth of what they may, so do the next ones, a bin more or less."""
    predictor = Predictor()
    for _ in range(500):
        predictor.ended(200, 1000)
    predictor.look(NONE, NONE)
    assert 190 <= predictor.predict(0, 1000) <= 230


def test_short_ones_that_finish_first_do_not_fool_it() -> None:
    """Ten of a hundred have ended early; the ninety that run on say that most are long."""
    predictor = Predictor()
    for _ in range(10):
        predictor.ended(50, 1000)
    predictor.look(np.full(90, 300, dtype=np.int32), np.full(90, 1000, dtype=np.int32))
    assert predictor.predict(0, 1000) > 850


def test_who_has_lived_on_is_expected_to_live_longer() -> None:
    """The prediction is conditional on what a sequence has produced already."""
    predictor = Predictor()
    for _ in range(200):
        predictor.ended(100, 1000)
        predictor.ended(900, 1000)
    predictor.look(NONE, NONE)
    assert 450 < predictor.predict(0, 1000) < 600
    assert 850 < predictor.predict(300, 1000) < 950


def test_a_prediction_is_more_than_there_is_and_no_more_than_the_limit() -> None:
    """However wrong it was before."""
    predictor = Predictor()
    for _ in range(500):
        predictor.ended(10, 1000)
    predictor.look(NONE, NONE)
    assert predictor.predict(999, 1000) == 1000
    assert 500 < predictor.predict(500, 1000) <= 1000


def test_without_learning_everything_is_reserved() -> None:
    """For those who cannot afford a preemption."""
    predictor = Predictor(learning=False)
    for _ in range(500):
        predictor.ended(10, 1000)
    predictor.look(NONE, NONE)
    assert predictor.predict(0, 1000) == 1000


def test_old_evidence_fades() -> None:
    """A change of workload is learned."""
    predictor = Predictor()
    for _ in range(5000):
        predictor.ended(100, 1000)
    for _ in range(20000):
        predictor.ended(600, 1000)
    predictor.look(NONE, NONE)
    assert predictor.predict(0, 1000) > 550
