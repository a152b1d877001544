"""Bias, penalties and masks, against one row at a time in plain Python."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.test_sampling import Identity, logits, rows
from toka.wire import MAX_BIAS, Sampling, pack
from workers import memory
from workers.compact import Longs, Places
from workers.sampling import choose
from workers.shaping import BadSampling, Shaping

VOCAB = 300


def upload(array: Any) -> Tensor:
    return torch.from_numpy(array)


def shaping(max_slots: int = 8) -> Shaping:
    return Shaping(max_slots, VOCAB, upload)


def ints(*numbers: int) -> Longs:
    return np.array(numbers, np.int64)


@dataclass
class Row:
    """One sequence, and its options in plain numbers."""

    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    allowed: list[int] = field(default_factory=list)
    min_tokens: int = 0
    blocked: list[int] = field(default_factory=list)

    def sampling(self) -> Sampling:
        return Sampling(
            repetition_penalty=self.repetition,
            presence_penalty=self.presence,
            frequency_penalty=self.frequency,
            allowed=pack(self.allowed),
            min_tokens=self.min_tokens,
            blocked=pack(self.blocked),
            bias_ids=pack(self.bias),
            bias=np.array(list(self.bias.values()), "<f4").tobytes(),
        )

    def admit(self, state: Shaping, slot: int) -> None:
        ids = ints(*self.prompt, *self.answer)
        state.admit(slot, self.sampling(), ids, len(self.prompt))

    def oracle(self, scores: Sequence[float]) -> list[float]:
        """The logits it should get, token by token."""
        counts, result = Counter(self.answer), []
        for token, raw in enumerate(scores):
            score = raw + self.bias.get(token, 0.0)
            if token in counts or token in self.prompt:
                score = score * self.repetition if score < 0 else score / self.repetition
            score -= self.frequency * counts[token] + self.presence * (token in counts)
            if self.allowed and token not in self.allowed:
                score = -np.inf
            if len(self.answer) < self.min_tokens and token in self.blocked:
                score = -np.inf
            result.append(score)
        return result


def shaped(state: Shaping, slots: Sequence[int], positions: Sequence[int], scores: Tensor) -> Tensor:
    """The logits of a roster's rows after its shape, if it has one."""
    scores = scores.clone()
    shape = state.shape(ints(*slots))
    if shape is not None:
        shape.apply(scores, torch.tensor(positions))
    return scores


def assert_shaped(state: Shaping, held: dict[int, Row], scores: Tensor) -> None:
    slots = list(held)
    positions = [len(row.prompt) + len(row.answer) for row in held.values()]
    found = shaped(state, slots, positions, scores[: len(slots)])
    wanted = [row.oracle(own.tolist()) for row, own in zip(held.values(), scores, strict=False)]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float32))


ONE = {
    "bias": Row([1, 2], bias={0: 3.5, 299: -100.0, 17: 100.0}),
    "repetition": Row([1, 2, 2, 5], [7, 7, 1], repetition=1.7),
    "repetition below 1": Row([1, 2, 2, 5], [7, 7, 1], repetition=0.5),
    "presence": Row([1, 2], [7, 7, 9], presence=1.5),
    "frequency": Row([1, 2], [7, 7, 9], frequency=-0.75),
    "min_tokens": Row([1, 2], [7], min_tokens=2, blocked=[3, 250]),
    "min_tokens reached": Row([1, 2], [7, 8], min_tokens=2, blocked=[3, 250]),
    "allowed": Row([1, 2], allowed=[4, 6, 299]),
    "all": Row([1, 2, 4], [4, 6], 1.3, 0.5, 0.25, {4: 2.0, 6: -1.0, 250: 9.0}, [4, 6, 8, 250], 5, [250, 251]),
}


@pytest.mark.parametrize("name", ONE)
def test_each_option_does_what_it_says(name: str) -> None:
    """Alone, and beside rows that have no options and stay what they are."""
    state, scores = shaping(), logits(3)
    ONE[name].admit(state, 5)
    assert_shaped(state, {5: ONE[name]}, scores)
    assert_shaped(state, {0: Row([1]), 5: ONE[name], 3: Row([2])}, scores)
    beside = shaped(state, [0, 5, 3], [1, 3, 1], scores)
    assert torch.equal(beside[[0, 2]], scores[[0, 2]])


def test_all_rows_together() -> None:
    """Each gets its own, though they share tables."""
    state = shaping(16)
    for slot, row in enumerate(ONE.values()):
        row.admit(state, slot)
    assert_shaped(state, dict(enumerate(ONE.values())), logits(len(ONE)))


def test_neutral_values_hold_no_state() -> None:
    """A roster of nothing but neutral values has no shape, and so goes the short way."""
    state = shaping()
    state.admit(0, Sampling(), ints(1, 2), 1)
    state.admit(1, Sampling(min_tokens=5), ints(1, 2), 1)
    state.admit(2, Sampling(blocked=pack([3])), ints(1, 2), 2)
    state.admit(3, Sampling(min_tokens=2, blocked=pack([3])), ints(1, 2, 3, 4), 2)
    assert state.shape(ints(0, 1, 2, 3)) is None
    Row([1], presence=1.0).admit(state, 4)
    assert state.shape(ints(0, 1, 2, 3)) is None
    assert state.shape(ints(0, 4)) is not None


def test_where_all_that_is_allowed_is_blocked_the_allowed_win() -> None:
    """Something has to come, and nothing that is not allowed may."""
    state, scores = shaping(), logits(1)
    row = Row([1], allowed=[3, 4], min_tokens=9, blocked=[3, 4, 5])
    row.admit(state, 0)
    found = shaped(state, [0], [1], scores)[0]
    assert torch.isfinite(found).nonzero().squeeze(1).tolist() == [3, 4]


def test_answers_are_counted_as_they_come() -> None:
    """After each token the penalties are those of the whole answer; a dead row's token does not count."""
    state, scores, random = shaping(), logits(3), Random(1)
    held = {slot: Row([1, slot], [], 1.2, 0.5, 0.25) for slot in (6, 2, 4)}
    held[2] = Row([9], [], min_tokens=1, blocked=[3])
    for slot, row in held.items():
        row.admit(state, slot)
    for _ in range(12):
        shape = state.shape(ints(*held))
        assert shape is not None
        ids = [random.randrange(5) for _ in held]
        dead = [random.random() < 0.3 for _ in held]
        shape.count(torch.tensor(ids), torch.tensor(dead))
        for row, token, gone in zip(held.values(), ids, dead, strict=True):
            row.answer += [] if gone else [token]
        assert_shaped(state, held, scores)


def test_after_a_preemption_the_counts_are_those_of_the_whole_answer() -> None:
    """What was generated before comes back behind the prompt, and counts as the answer."""
    scores, row = logits(1), Row([1, 2, 3], [], 1.4, 0.5, 0.25, min_tokens=6, blocked=[8])
    state = shaping()
    row.admit(state, 0)
    for token in (7, 3, 7):
        shape = state.shape(ints(0))
        assert shape is not None
        shape.count(torch.tensor([token]), torch.tensor([False]))
        row.answer.append(token)
    before = shaped(state, [0], [6], scores)
    state.release(ints(0))
    row.admit(state, 5)
    assert torch.equal(shaped(state, [5], [6], scores), before)
    assert_shaped(state, {5: row}, scores)


@pytest.mark.parametrize("seed", range(4))
def test_a_random_story(seed: int) -> None:
    """Sequences with any options come and go, lists of any length; the tables grow, are given on and given back."""
    random, state, held = Random(seed), shaping(20), dict[int, Row]()
    scores = logits(20, seed=seed)

    def some(most: int) -> list[int]:
        return random.sample(range(VOCAB), random.randint(1, most))

    for _ in range(60):
        for slot in [slot for slot in held if random.random() < 0.25]:
            del held[slot]
            state.release(ints(slot))
        for slot in random.sample(range(20), random.randint(0, 6)):
            if slot in held:
                continue
            row = Row(some(9), some(9) if random.random() < 0.3 else [])
            if random.random() < 0.5:
                row.repetition, row.presence, row.frequency = random.uniform(0.5, 2), random.uniform(-2, 2), 0.5
            if random.random() < 0.5:
                row.bias = {token: random.uniform(-9, 9) for token in some(120)}
            if random.random() < 0.4:
                row.allowed = some(70)
            if random.random() < 0.4:
                row.min_tokens, row.blocked = random.randint(1, 6), [random.randrange(VOCAB) for _ in range(3)]
                row.blocked = [token for token in row.blocked if token not in row.allowed]
            row.admit(state, slot)
            held[slot] = row
        if held:
            assert_shaped(state, held, scores)
    state.release(ints(*range(20)))
    parts = (state.bias, state.blocked, state.allowed)
    assert [part.ids.numel() + part.values.numel() for part in parts] == [0, 0, 0]
    assert state.penalties.counts.numel() == state.penalties.prompt.numel() == 0


def test_penalties_hold_rows_of_their_users_only() -> None:
    """Not of every slot: a vocabulary's counts are large."""
    state = Shaping(2048, VOCAB, upload)
    for slot in (2047, 5, 900, 901, 902):
        Row([1], presence=1.0).admit(state, slot)
    assert len(state.penalties.counts) == 8


def test_places_never_outnumber_the_slots() -> None:
    """Doubling stops there."""
    places = Places(5)
    assert sorted(places.take(slot) for slot in range(5)) == [0, 1, 2, 3, 4]
    assert places.size == 5
    places.give(ints(0, 1, 2, 3, 4))
    assert places.size == 0


def test_slices_shape_their_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where logits are made in slices, each row still gets its own, whether it samples or not, and its scores."""
    state, scores = shaping(16), logits(12)
    for slot, row in enumerate(ONE.values(), start=2):
        row.admit(state, slot)
    roster = ints(*reversed(range(12)))
    shape = state.shape(roster)
    parameters = rows(12, temperature=[0.0, 1.0] * 6, position=[4] * 12)
    whole = choose(Identity(), scores.clone(), parameters, shape).ids
    assert not torch.equal(whole, choose(Identity(), scores.clone(), parameters).ids)
    for most in (5, 2, 1):
        monkeypatch.setattr(memory, "MAX_LOGITS", most * VOCAB)
        assert torch.equal(choose(Identity(), scores.clone(), parameters, shape).ids, whole)


def test_greedy_rows_take_the_best_after_shaping() -> None:
    """Temperature 0 is no way around bias, penalties or masks."""
    state, scores = shaping(16), logits(len(ONE))
    for slot, row in enumerate(ONE.values()):
        row.admit(state, slot)
    best = [int(np.argmax(row.oracle(own))) for row, own in zip(ONE.values(), scores.tolist(), strict=True)]
    shape = state.shape(ints(*range(len(ONE))))
    position = [len(row.prompt) + len(row.answer) for row in ONE.values()]
    parameters = rows(len(ONE), temperature=0.0, position=position)
    assert choose(Identity(), scores, parameters, shape).ids.tolist() == best


def test_what_is_not_allowed_never_comes() -> None:
    """Whatever else filters, at any temperature."""
    state, scores = shaping(), logits(1)
    Row([1], allowed=[4, 6, 299]).admit(state, 0)
    shape = state.shape(ints(*[0] * 200))
    for fields in ({}, {"top_k": 50}, {"top_p": 0.999999}, {"min_p": 1e-9}, {"temperature": 100.0}):
        ids = choose(Identity(), scores.repeat(200, 1), rows(200, **fields), shape).ids
        assert set(ids.tolist()) <= {4, 6, 299}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bias_ids": pack([1, 2]), "bias": bytes(4)}, "2 ids have 1 biases"),
        ({"bias_ids": pack([1]), "bias": bytes(3)}, "bias of 3 bytes"),
        ({"bias_ids": bytes(5), "bias": bytes(4)}, "bias_ids of 5 bytes"),
        ({"allowed": pack([VOCAB])}, "allowed outside 0 … 299"),
        ({"allowed": pack([-1])}, "allowed outside 0 … 299"),
        ({"allowed": pack([1] * (MAX_BIAS + 1))}, "allowed of more than 1024 ids"),
        ({"blocked": pack([VOCAB]), "min_tokens": 1}, "blocked outside 0 … 299"),
        ({"repetition_penalty": 0.0}, r"a repetition penalty of 0\.0"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(fields: dict[str, Any], words: str) -> None:
    """An id without a place would fail later, and far from its cause."""
    with pytest.raises(BadSampling, match=words):
        shaping().admit(0, Sampling(**fields), ints(1, 2), 2)
