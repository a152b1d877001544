"""Choosing tokens."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workers import memory, noise, sampling
from workers.sampling import SamplingRows, choose, sample

CUT = 1e-9


def rows(count: int, **fields: Any) -> SamplingRows:
    """Parameters of `count` rows: each a list, or one value for all; seeds count up from 0."""
    types = {
        "temperature": torch.float32,
        "top_k": torch.int32,
        "top_p": torch.float32,
        "min_p": torch.float32,
        "seed": torch.int64,
        "choice": torch.int64,
        "position": torch.int64,
    }
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "choice": 0, "position": 1}
    values |= {"seed": list(range(count))} | fields
    made = {
        name: torch.tensor(values[name] if isinstance(values[name], list) else [values[name]] * count, dtype=kind)
        for name, kind in types.items()
    }
    return SamplingRows(
        **made,
        greedy_only=bool((made["temperature"] == 0).all()),
        plain=bool(((made["top_k"] == 0) & (made["top_p"] == 1) & (made["min_p"] == 0)).all()),
    )


def logits(count: int, vocab: int = 300, seed: int = 0) -> Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def drawn(row: Tensor, count: int, **fields: Any) -> Tensor:
    """How often each token comes in `count` draws from the same logits: int64[vocab]."""
    return torch.bincount(sample(row.expand(count, -1).contiguous(), rows(count, **fields)), minlength=len(row))


def assert_follows(counts: Tensor, probabilities: Tensor) -> None:
    """Pearson's chi-square at 5 standard deviations above its mean, over tokens expected 5 times or more; and nothing
    that has no probability."""
    total = int(counts.sum())
    assert not counts[probabilities == 0].any()
    expected = probabilities.double() * total
    common = expected >= 5
    observed = torch.cat((counts[common], counts[~common].sum()[None])).double()
    wanted = torch.cat((expected[common], expected[~common].sum()[None]))
    observed, wanted = observed[wanted > CUT], wanted[wanted > CUT]
    statistic = ((observed - wanted).square() / wanted).sum()
    freedom = len(wanted) - 1
    assert statistic <= freedom + 5 * (2 * freedom) ** 0.5, f"{statistic:.1f} at {freedom} degrees of freedom"


def test_temperature_zero_takes_the_most_probable_token() -> None:
    """And the lowest id of equals, alone or beside rows that draw."""
    scores = logits(4)
    scores[1, [7, 70, 170]] = 50.0
    best = scores.argmax(-1)
    assert best[1] == 7
    assert torch.equal(sample(scores, rows(4, temperature=0.0)), best)
    mixed = sample(scores, rows(4, temperature=[0.0, 0.0, 1.0, 9e-6]))
    assert torch.equal(mixed[[0, 1, 3]], best[[0, 1, 3]])


def test_draws_follow_the_softmax() -> None:
    """Chi-square over 20,000 seeds."""
    row = logits(1, vocab=40)[0]
    assert_follows(drawn(row, 20_000), row.softmax(-1))


@pytest.mark.parametrize("vocab", [1024, 1203, 2600])
def test_draws_follow_the_softmax_over_tiles(vocab: int) -> None:
    """However many tiles there are, the last of them whole or not: each token has its own probability, and each tile
    that of its tokens."""
    row = logits(1, vocab=vocab)[0]
    counts = drawn(row, 20_000)
    assert_follows(counts, row.softmax(-1))
    tiles = torch.arange(vocab) // sampling.TILE
    sums = [torch.zeros(int(tiles[-1]) + 1).index_add_(0, tiles, of.float()) for of in (counts, row.softmax(-1))]
    assert_follows(sums[0], sums[1])


def test_filtered_draws_follow_the_softmax_over_tiles() -> None:
    """What top_k, top_p and min_p leave lies in several tiles, in some of them nothing."""
    row = logits(1, vocab=2600)[0]
    row[512:1024] = -50
    for fields, kept in (
        ({"top_k": 30}, row >= row.topk(30).values[-1]),
        ({"top_p": 0.6}, nucleus(row, 0.6) > 0),
        ({"min_p": 0.1}, row >= row.max() + np.log(0.1)),
    ):
        assert_follows(drawn(row, 10_000, **fields), row.masked_fill(~kept, -torch.inf).softmax(-1))


def test_a_tile_whose_tokens_are_all_masked_gives_none() -> None:
    """A row may have one token left, in any tile."""
    row = torch.full((1300,), -torch.inf)
    row[1299] = -3.0
    assert drawn(row, 50)[1299] == 50


def test_draws_over_positions_and_choices_follow_the_softmax() -> None:
    """One seed gives independent noise at each position, and to each choice."""
    row = logits(1, vocab=40)[0]
    assert_follows(drawn(row, 20_000, seed=3, position=list(range(20_000))), row.softmax(-1))
    assert_follows(drawn(row, 20_000, seed=3, choice=list(range(20_000))), row.softmax(-1))


@pytest.mark.parametrize("temperature", [0.3, 0.7, 2.0])
def test_temperature_divides_the_logits(temperature: float) -> None:
    """softmax(logits / temperature)."""
    row = logits(1, vocab=40)[0]
    assert_follows(drawn(row, 20_000, temperature=temperature), (row / temperature).softmax(-1))


def test_top_k_keeps_the_most_probable() -> None:
    """Among the k best, in the proportions of the softmax."""
    row = logits(1, vocab=40)[0]
    best = row.topk(5).indices
    kept = torch.zeros(40).index_copy_(0, best, row[best].softmax(-1))
    assert_follows(drawn(row, 10_000, top_k=5), kept)


def nucleus(row: Tensor, top_p: float) -> Tensor:
    """The probabilities after top_p, written out: float32[vocab]."""
    probabilities = row.softmax(-1)
    kept, total = torch.zeros_like(probabilities), 0.0
    for token in probabilities.argsort(descending=True).tolist():
        if total >= top_p and total > 0:
            break
        kept[token] = probabilities[token]
        total += float(probabilities[token])
    return kept / kept.sum()


@pytest.mark.parametrize("top_p", [0.1, 0.6, 0.95])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float) -> None:
    """The token that reaches the sum stays."""
    row = logits(1, vocab=40)[0]
    assert_follows(drawn(row, 10_000, top_p=top_p), nucleus(row, top_p))


def test_top_p_applies_at_the_temperature_and_to_what_top_k_leaves() -> None:
    """temperature, then top_k, then top_p over the renormalised rest."""
    row = logits(1, vocab=40)[0]
    hot = row / 1.7
    hot[hot < hot.topk(9).values[-1]] = -torch.inf
    assert_follows(drawn(row, 10_000, temperature=1.7, top_k=9, top_p=0.7), nucleus(hot, 0.7))


@pytest.mark.parametrize("top_p", [0.5, 0.999])
def test_a_nucleus_wider_than_the_first_look(top_p: float) -> None:
    """Flat distributions need more candidates than are looked at first."""
    row = logits(1, vocab=1000)[0] * 0.01
    wanted = nucleus(row, top_p)
    counts = drawn(row, 2000, top_p=top_p)
    assert not counts[wanted == 0].any()
    assert abs(float((counts > 0).sum()) - float((1 - (1 - wanted).pow(2000)).sum())) < 60


def test_top_k_of_one_is_greedy() -> None:
    """At any temperature, ties included."""
    scores = logits(64)
    scores[:, [3, 33]] = 40.0
    assert torch.equal(sample(scores, rows(64, top_k=1, temperature=5.0)), scores.argmax(-1))


def test_a_tiny_top_p_is_greedy() -> None:
    """At least one token stays."""
    scores = logits(64)
    assert torch.equal(sample(scores, rows(64, top_p=1e-9)), scores.argmax(-1))


def test_filters_that_leave_everything_change_nothing() -> None:
    """top_k of the whole vocabulary or more, and top_p of 1."""
    scores = logits(64)
    plain = sample(scores, rows(64))
    assert torch.equal(sample(scores, rows(64, top_k=300)), plain)
    assert torch.equal(sample(scores, rows(64, top_k=2**31 - 1)), plain)
    assert torch.equal(sample(scores, rows(64, top_k=[5] + [0] * 63))[1:], plain[1:])


def test_tokens_equal_to_the_last_that_stays_stay() -> None:
    """So the order of equals decides nothing."""
    row = torch.zeros(600)
    row[100] = 1.0
    assert (drawn(row, 3000, top_k=2) > 0).sum() > 500


@pytest.mark.parametrize("temperature", [1e-5, 2e-5, 1e-3, 1e30])
def test_extreme_temperatures_give_a_token(temperature: float) -> None:
    """No NaN, whatever the logits' size: a cold row takes a best token, a hot one any."""
    scores = torch.cat((logits(4) * 1000, logits(4, seed=1) + 1e4))
    for fields in ({}, {"top_p": 0.9}, {"top_k": 20}):
        ids = sample(scores, rows(8, temperature=temperature, **fields))
        assert ((ids >= 0) & (ids < 300)).all()
        if temperature < 1:
            assert torch.equal(ids, scores.argmax(-1))


def test_a_cold_row_still_draws_between_near_ties() -> None:
    """Noise is not lost beside large logits: two tokens a temperature apart come as often as they should."""
    row = torch.full((8,), 10.0)
    row[[2, 5]] = torch.tensor([30.0, 30.0 + 2**-10])
    counts = drawn(row, 4000, temperature=2**-10)
    assert_follows(counts, torch.tensor([0, 0, 1, 0, 0, np.e, 0, 0], dtype=torch.float32) / (1 + np.e))


MIXED: dict[str, list[Any]] = {
    "temperature": [0.0, 1.0, 0.7, 1.3, 1.0, 0.9, 1.0, 1e-5, 2.0, 1.0],
    "top_k": [0, 0, 5, 0, 40, 290, 1, 3, 0, 0],
    "top_p": [1.0, 1.0, 1.0, 0.9, 0.5, 0.99, 0.3, 1.0, 0.999999, 1e-6],
    "min_p": [0.0, 0.2, 0.0, 0.0, 0.1, 0.01, 0.5, 0.0, 1.0, 0.3],
    "seed": [1, 2, -3, 4, 5, 6, 7, 8, 2**63 - 1, 10],
    "choice": [0, 3, 0, 0, 1, 0, 0, 2, 0, 0],
    "position": [1, 100, 5, 6, 7, 8000, 9, 10, 11, 12],
}


def test_a_row_gets_the_same_token_alone_and_in_a_batch() -> None:
    """Whatever the others ask for."""
    scores = logits(10)
    together = sample(scores, rows(10, **MIXED))
    for index in range(10):
        own = rows(1, **{name: [values[index]] for name, values in MIXED.items()})
        assert sample(scores[index : index + 1], own) == together[index]


def test_the_path_of_other_devices_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting everything, as devices do that must not wait for the host, leaves the same tokens."""
    scores = logits(10)
    together = rows(10, **MIXED)
    scaled = (scores - scores.amax(-1, keepdim=True)) / together.temperature.clamp(min=1e-5)[:, None]
    looked = sampling._floor(scaled, together)
    full, _ = sampling._nucleus(scaled.sort(-1, descending=True).values, scaled, together)
    full = torch.maximum(full, together.min_p.log()[:, None])
    assert torch.equal(looked, full)
    monkeypatch.setattr(sampling, "_CANDIDATES", 8)
    assert torch.equal(sampling._floor(scaled, together), full)


def test_no_rows_give_no_ids() -> None:
    """A step without a finished chunk samples nothing."""
    for fields in ({}, {"temperature": 0.0}):
        assert sample(torch.empty(0, 300), rows(0, **fields)).shape == (0,)


class Identity:
    """Hidden states are the logits; remembers how many rows it was asked for."""

    vocab_size = 300

    def __init__(self) -> None:
        self.asked: list[int] = []

    def logits(self, hidden: Tensor) -> Tensor:
        self.asked.append(len(hidden))
        return hidden


def test_choose_bounds_the_logits_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows go through the output projection in slices, and get the tokens they would have got at once."""
    scores, parameters = logits(10), rows(10, **MIXED)
    whole = choose(Identity(), scores, parameters).ids
    monkeypatch.setattr(memory, "MAX_LOGITS", 4 * 300 + 1)
    model = Identity()
    assert torch.equal(choose(model, scores, parameters).ids, whole)
    assert model.asked == [4, 4, 2]
    monkeypatch.setattr(memory, "MAX_LOGITS", 10)
    assert torch.equal(choose(Identity(), scores, parameters).ids, whole)


@pytest.mark.parametrize("min_p", [0.02, 0.3])
def test_min_p_keeps_what_is_probable_enough(min_p: float) -> None:
    """A share of the greatest probability, at the temperature and beside top_k."""
    row = logits(1, vocab=40)[0]
    kept = (row / 1.5).softmax(-1)
    kept[kept < min_p * kept.max()] = 0
    assert_follows(drawn(row, 10_000, temperature=1.5, min_p=min_p), kept / kept.sum())
    kept[kept < kept.topk(2).values[-1]] = 0
    assert_follows(drawn(row, 10_000, temperature=1.5, min_p=min_p, top_k=2), kept / kept.sum())


def test_min_p_of_one_is_greedy() -> None:
    """The most probable token always stays."""
    scores = logits(64)
    assert torch.equal(sample(scores, rows(64, min_p=1.0)), scores.argmax(-1))


RACES: dict[str, list[Any]] = {
    "temperature": [1.0, 0.3, 2.0, 1.0, 0.01, 5.0],
    "seed": [1, 2, -3, 2**63 - 1, -(2**63), 6],
    "choice": [0, 1, 2, 3, 2**31 - 1, 0],
    "position": [1, 2**20 + 5, 3, 4, 5, 6],
}
GOLDEN = [261, 105, 12, 267, 199, 34, 257, 283]
GOLDEN_TILES = [1373, 1424, 1124, 245, 202, 399, 1079, 1]


def test_tokens_of_rows_without_options_stay_what_they_were() -> None:
    """The draws of eight seeds, beside rows with min_p or alone, from one tile and from several."""
    for vocab, golden in ((300, GOLDEN), (1700, GOLDEN_TILES)):
        scores = logits(8, vocab=vocab, seed=7)
        assert sample(scores, rows(8)).tolist() == golden
        beside = rows(16, min_p=[0.0] * 8 + [0.5] * 8)
        assert sample(torch.cat((scores, scores)), beside).tolist()[:8] == golden


def test_the_races_are_what_they_are_said_to_be() -> None:
    """argmax of L_j − log E_j, and then of z_i − log E_i in the tile, written out in float64 from the noise's words."""
    scores, parameters = logits(6, vocab=1700), rows(6, **{name: values[:6] for name, values in RACES.items()})
    got = sample(scores, parameters).tolist()
    for row, token in enumerate(got):
        z = (scores[row].double() - scores[row].double().max()) / parameters.temperature[row].double()
        own = parameters.pick(slice(row, row + 1))
        place = own.seed.numpy(), own.choice.numpy(), own.position.numpy(), np.zeros(1, np.int64)
        gumbels = []
        for lane, count in ((noise.TILES, 4), (noise.TOKENS, 1700)):
            words = noise.words_numpy(*place, count, lane)[0].astype(np.float64)
            gumbels.append(-np.log(-np.log1p(-(words + 0.5) / 2**32)))
        sums = np.array([float(part.logsumexp(0)) for part in torch.split(z, sampling.TILE)])
        tile = int((sums + gumbels[0]).argmax())
        part = slice(tile * sampling.TILE, (tile + 1) * sampling.TILE)
        assert token == part.start + int((z.numpy()[part] + gumbels[1][part]).argmax())
