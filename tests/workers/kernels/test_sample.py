"""The sampler of GPUs, against the sampler of the CPU."""

import dataclasses
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.workers.test_noise import KNOWN, tensors, words
from tests.workers.test_sampling import GOLDEN, GOLDEN_TILES, MIXED, assert_follows, logits
from tests.workers.test_sampling import rows as parameters
from toka.wire import NO_TOKEN
from workers import noise
from workers.kernels import floors as search
from workers.kernels import sample as module
from workers.kernels.sample import Sampler
from workers.sampling import SamplerState, sample
from workers.scores import Scores

SLOTS = 12
"""The last one is the spare slot."""
PLAIN: dict[str, list[Any]] = {
    **{name: MIXED[name] for name in ("temperature", "seed", "choice")},
    "position": [1, 100, 5, 2**20 + 7, 7, 8000, 2**31 - 1, 10, 11, 12],
}


def state(device: torch.device, fields: dict[str, list[Any]], slots: list[int]) -> SamplerState:
    """The fields of `parameters`, each row's in its slot, and nothing in the others."""
    count = len(slots)
    own = parameters(count, **fields)
    made: dict[str, Tensor] = {}
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "choice"):
        values = getattr(own, name)
        # What lies in other slots must not matter.
        made[name] = torch.full((max(SLOTS, count + 1),), 3, dtype=values.dtype)
        made[name][slots] = values
    size = len(made["seed"])
    made["stops"] = torch.full((size, 9), -1)
    made["dead"] = torch.zeros(size, dtype=torch.bool)
    made["dead"][-1] = True
    made["last"] = torch.full((size,), 77)
    return SamplerState(**{name: tensor.to(device) for name, tensor in made.items()})


def drawn(
    scores: Tensor, fields: dict[str, list[Any]], device: torch.device, *, full: bool = True, **changes: Tensor
) -> tuple[list[int], SamplerState]:
    """The ids of all rows, and the state they leave."""
    count = len(scores)
    slots = list(range(count))
    if count < SLOTS:
        slots = slots[::-1]
    own = dataclasses.replace(state(device, fields, slots), **changes)
    ids = torch.full((count,), -5, dtype=torch.int32, device=device)
    position = parameters(count, **fields).position.to(device)
    sampler = Sampler(count + 3, scores.shape[1], device)
    sampler(scores.to(device), torch.tensor(slots, device=device), position, own, ids, full=full)
    return ids.tolist(), own


def expected(scores: Tensor, fields: dict[str, list[Any]]) -> list[int]:
    found: list[int] = sample(scores.float(), parameters(len(scores), **fields)).tolist()
    return found


@triton.jit
def _philox(counter_ptr, seed_ptr, out_ptr):  # type: ignore[no-untyped-def]  # values of Triton's own types
    zero = tl.zeros((1,), tl.uint32)
    a, b, c, d = tl.philox(
        tl.load(seed_ptr),
        zero + tl.load(counter_ptr).to(tl.uint32),
        zero + tl.load(counter_ptr + 1).to(tl.uint32),
        zero + tl.load(counter_ptr + 2).to(tl.uint32),
        zero + tl.load(counter_ptr + 3).to(tl.uint32),
    )
    at = tl.arange(0, 1)
    tl.store(out_ptr + at, a.to(tl.int64))
    tl.store(out_ptr + 1 + at, b.to(tl.int64))
    tl.store(out_ptr + 2 + at, c.to(tl.int64))
    tl.store(out_ptr + 3 + at, d.to(tl.int64))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...], device: torch.device
) -> None:
    """Triton's generator, with the seed as its key, is that of Random123's known-answer test."""
    seed = torch.tensor([key[1] << 32 | key[0]], dtype=torch.uint64).view(torch.int64).to(device)
    out = torch.zeros(4, dtype=torch.int64, device=device)
    _philox[(1,)](torch.tensor(counter, device=device), seed, out)
    assert tuple(out.tolist()) == expected


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _noise(seed_ptr, choice_ptr, position_ptr, out_ptr, first, LANE: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    seed, choice, position = tl.load(seed_ptr + row), tl.load(choice_ptr + row), tl.load(position_ptr + row)
    at = tl.arange(0, COUNT)
    tl.store(out_ptr + row * COUNT + at, module._gumbels(seed, first, position, choice, LANE, COUNT))


@pytest.mark.parametrize(("lane", "first"), [(noise.TOKENS, 0), (noise.TOKENS, 512 * 77), (noise.TILES, 0)])
def test_the_noise_of_the_cpu(lane: int, first: int, device: torch.device) -> None:
    """−log of the exponential noise, for any seed and place."""
    rows = tensors((0, 0, 1), (-1, 5, 8191), (-(2**63), 2**31, 0), (2**63 - 1, 0, 2**31 - 1), (42, 1, 2))
    want = -noise.exponentials(*rows, torch.full((5,), first), 512, lane).log()
    out = torch.zeros(5, 512, device=device)
    _noise[(5,)](*(row.to(device) for row in rows), out, first // 4, LANE=lane, COUNT=512)
    torch.testing.assert_close(out.cpu(), want, atol=2e-6, rtol=2e-6)
    assert len(words(rows, 512).tolist()) == 5


@pytest.mark.parametrize("vocab", [40, 512, 1203])
def test_plain_rows_get_the_tokens_of_the_cpu(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Greedy ones among others, at any temperature, seed, choice and position, however the vocabulary is cut."""
    scores = logits(10, vocab=vocab).to(dtype)
    assert drawn(scores, PLAIN, device, full=False)[0] == expected(scores, PLAIN)


@pytest.mark.parametrize("vocab", [300, 2600])
def test_filtered_rows_get_the_tokens_of_the_cpu(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Each way to choose and all of them together, beside rows that use none."""
    scores = logits(10, vocab=vocab, seed=vocab).to(dtype)
    assert drawn(scores, MIXED, device)[0] == expected(scores, MIXED)


def test_greedy_rows_take_the_lowest_of_equals(device: torch.device) -> None:
    """By temperature or a top_k of 1, with or without the full path, in one tile or several."""
    scores = logits(4, vocab=1700)
    scores[0, [7, 70, 1600]] = 50.0
    scores[1, [600, 1100]] = 50.0
    fields: dict[str, list[Any]] = {"temperature": [0.0, 9e-6, 5.0, 0.0], "top_k": [0, 0, 1, 7]}
    for full in (False, True):
        assert drawn(scores, fields, device, full=full)[0] == scores.argmax(-1).tolist()


def floors(scores: Tensor, fields: dict[str, list[Any]], device: torch.device) -> Tensor:
    """bool[N, vocab]: what the sampler's floors and min_p leave."""
    count = len(scores)
    sampler = Sampler(count, scores.shape[1], device)
    own = state(device, fields, list(range(count)))
    position = torch.zeros(count, dtype=torch.int64, device=device)
    ids = torch.zeros(count, dtype=torch.int32, device=device)
    sampler(scores.to(device), torch.arange(count, device=device), position, own, ids, full=True)
    return scores.float() >= sampler._floors.cpu()[:, None]


def left(scores: Tensor, fields: dict[str, list[Any]]) -> Tensor:
    """bool[N, vocab]: the same by sorting, in float64."""
    own = parameters(len(scores), **fields)
    z = scores.double()
    z = (z - z.amax(-1, keepdim=True)) / own.temperature[:, None].double()
    kept = torch.ones_like(z, dtype=torch.bool)
    for row in range(len(z)):
        ranked = z[row].sort(descending=True).values
        if 0 < own.top_k[row] < len(ranked):
            kept[row] &= z[row] >= ranked[own.top_k[row] - 1]
        if own.top_p[row] < 1:
            own_part = ranked[ranked >= z[row][kept[row]].min()]
            before = own_part.exp().cumsum(0) - own_part.exp()
            stays = before < own.top_p[row].double() * own_part.exp().sum()
            stays[0] = True
            kept[row] &= z[row] >= own_part[stays].min()
    return kept


FILTERS: dict[str, list[Any]] = {
    "temperature": [1.0, 0.5, 1.0, 1.0, 3.0, 1.0, 1.0, 0.7, 1.0, 1.0, 1.0],
    "top_k": [2, 3, 40, 700, 2000, 0, 0, 0, 50, 2500, 2999],
    "top_p": [1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.5, 0.99, 0.8, 0.3, 1.0],
}


@pytest.mark.parametrize(
    ("kind", "room"), [("flat", 16), ("flat", 2048), ("peaked", 16), ("sorted", 2048), ("far", 16)]
)
def test_the_floors_are_those_of_sorting(
    kind: str, room: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the logits lie, and however soon the search may end; sums of float32 may err by a token of 3,000."""
    monkeypatch.setattr(search, "ROOM", room)
    scores = logits(11, vocab=3000)
    scores = {
        "flat": scores / 3,
        "peaked": scores * 2,
        "sorted": scores.sort(-1, descending=True).values,
        "far": scores - 2000.0,
    }[kind]
    got, want = floors(scores, FILTERS, device), left(scores, FILTERS)
    counts = (got != want).sum(-1)
    limited = torch.tensor(FILTERS["top_p"]) == 1
    assert not counts[limited].any()
    assert counts.max() <= 1


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "fields", [{"top_k": [1299] * 5}, {"top_k": [100] * 5, "top_p": [0.4] * 5}, {"top_p": [0.7, 0.7, 1e-6, 0.7, 0.7]}]
)
def test_floors_among_equals(
    fields: dict[str, list[Any]], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equals of the last one that stays stay, though they have no room; also where all are equal, or few are not −∞."""
    monkeypatch.setattr(search, "ROOM", 16)
    scores = logits(5, vocab=1300).mul(2).round()
    scores[0] = 0.0
    scores[1] = -7.0
    scores[2, 5:] = -torch.inf
    scores[3, 1290:] = 1.0
    got, want = floors(scores, fields, device), left(scores, fields)
    possible = scores > -torch.inf
    assert torch.equal(got & possible, want & possible)


def test_the_golden_tokens(device: torch.device) -> None:
    """Those of the CPU, which never change."""
    for vocab, golden in ((300, GOLDEN), (1700, GOLDEN_TILES)):
        assert drawn(logits(8, vocab=vocab, seed=7), {}, device, full=vocab < 512)[0] == golden


def test_a_row_gets_the_same_token_alone_and_in_a_batch(device: torch.device) -> None:
    """Whatever the others ask for."""
    scores = logits(10, vocab=1536)
    together, _ = drawn(scores, MIXED, device)
    for index in range(10):
        own = {name: [values[index]] for name, values in MIXED.items()}
        assert drawn(scores[index : index + 1].clone(), own, device)[0] == together[index : index + 1]


def test_a_stop_id_ends_a_slot(device: torch.device) -> None:
    """In any place of the list; the token before it does not, and other slots are left alone."""
    scores = logits(4)
    ids, own = drawn(scores, {}, device)
    stops = torch.full((SLOTS, 9), -1, device=device)
    # Row r has slot 3 − r.
    stops[3, 0], stops[2, 8], stops[1, 3] = ids[0], ids[1], ids[2] + 1
    again, after = drawn(scores, {}, device, stops=stops)
    assert again == ids
    assert after.dead.tolist() == [False, False, True, True] + [False] * (SLOTS - 5) + [True]
    assert after.last.tolist() == ids[::-1] + [77] * (SLOTS - 4)
    assert own.dead.tolist() == [False] * (SLOTS - 1) + [True]


@pytest.mark.parametrize("full", [False, True])
def test_a_dead_slot_changes_no_more(full: bool, device: torch.device) -> None:
    """Its row gets NO_TOKEN, and so do any number of rows of the spare slot."""
    scores = logits(6, vocab=700)
    own = state(device, {"top_p": [0.9] * 6 if full else [1.0] * 6}, [0, 1, 2, 3, 4, 5])
    own.dead[1] = True
    own.stops[:] = torch.arange(9, device=device)
    rows = torch.tensor([0, 1, SLOTS - 1, SLOTS - 1, 2, SLOTS - 1], device=device)
    ids = torch.zeros(6, dtype=torch.int32, device=device)
    Sampler(6, 700, device)(scores.to(device), rows, torch.ones_like(rows), own, ids, full=full)
    found = ids.tolist()
    assert [id == NO_TOKEN for id in found] == [False, True, True, True, False, True]
    assert own.last.tolist() == [found[0], 77, found[4]] + [77] * (SLOTS - 3)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
def test_logits_that_are_no_numbers_give_an_id(device: torch.device) -> None:
    """Any of the vocabulary, and the search for floors ends."""
    scores = logits(4, vocab=700)
    scores[0] = torch.nan
    scores[1, 3] = torch.nan
    scores[2] = -torch.inf
    scores[3, 9] = torch.inf
    for fields in ({"top_p": [0.5] * 4}, {"top_k": [600] * 4}, {"top_k": [2] * 4}, {}):
        ids, _ = drawn(scores, fields, device)
        assert all(0 <= id < 700 for id in ids)


@pytest.mark.parametrize(("vocab", "width"), [(300, 5), (300, 0), (3, 20), (2600, 1), (2600, 20)])
def test_scores_are_those_of_the_whole_vocabulary(
    vocab: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The chosen one's log-probability and the most probable tokens, of equals the lowest id first."""
    scores = logits(6, vocab=vocab)
    scores[1] = scores[1].round()
    scores[2] = 0.0
    scores[3, 2:] = -torch.inf
    scores[4, vocab // 2 :] = 1.5
    scores = scores.to(dtype)
    tokens = torch.tensor([0, 1, 2, 0, vocab - 1, 1])
    want = Scores.of(scores.float().log_softmax(-1), tokens, width)
    got = Sampler(7, vocab, device).scores(scores.to(device), tokens.to(device), width)
    torch.testing.assert_close(got.chosen.cpu(), want.chosen, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(got.values.cpu(), want.values, atol=2e-6, rtol=2e-6)
    assert got.ids.tolist() == want.ids.tolist()
    if width >= vocab:
        row = got.ids[5].tolist().index(1)
        assert float(got.values[5, row]) == float(got.chosen[5])


def test_the_shapes_are_checked(device: torch.device) -> None:
    """More rows than there is room for, or another vocabulary, are an error, and no rows are nothing."""
    sampler = Sampler(4, 300, device)
    own = state(device, {}, [0, 1, 2, 3])
    for count, vocab in ((5, 300), (2, 301)):
        rows = torch.zeros(count, dtype=torch.int64, device=device)
        with pytest.raises(ValueError, match="for a sampler of 4 × 300"):
            sampler(torch.zeros(count, vocab, device=device), rows, rows, own, rows.to(torch.int32), full=False)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    sampler(torch.zeros(0, 300, device=device), none, none, own, none.to(torch.int32), full=True)


CUDA = torch.device("cuda")
REAL = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROWS, VOCAB = 1024, 128_256
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 50},
    {"min_p": 0.05},
    {"top_k": 1000, "top_p": 0.8, "min_p": 0.001, "temperature": 1.3},
    {"top_p": 0.5},
]


def many(spread: float) -> tuple[Tensor, dict[str, list[Any]]]:
    """bfloat16 logits of ROWS × VOCAB on the GPU, and parameters of every kind by turns."""
    scores = torch.randn(ROWS, VOCAB, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1)) * spread
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    kinds = [defaults | KINDS[row % len(KINDS)] for row in range(ROWS)]
    fields: dict[str, list[Any]] = {name: [kind[name] for kind in kinds] for name in defaults}
    fields["seed"] = [(row - 500) * 2**40 + row for row in range(ROWS)]
    fields["choice"] = [row % 5 for row in range(ROWS)]
    fields["position"] = [2**20 + 3 * row for row in range(ROWS)]
    return scores.to(torch.bfloat16), fields


@pytest.mark.parametrize("spread", [1.0, 4.0])
class TestReal:
    """At the size of a real step."""

    pytestmark = REAL

    def test_tokens_are_those_of_the_cpu(self, spread: float) -> None:
        """All but near-ties: the last bits of a race, or the last token of a nucleus by a sum of float32."""
        scores, fields = many(spread)
        got, _ = drawn(scores, fields, CUDA)
        part = list(range(0, ROWS, 8))
        want = expected(scores[part].cpu(), {name: [values[row] for row in part] for name, values in fields.items()})
        wrong = [row for row, token in zip(part, want, strict=True) if got[row] != token]
        assert len(wrong) <= 2, wrong

    def test_a_row_gets_the_same_bits_alone(self, spread: float) -> None:
        """Its tokens, its floor, and the sums of its tiles."""
        scores, fields = many(spread)
        rows = torch.arange(ROWS, device=CUDA)
        together = Sampler(ROWS, VOCAB, CUDA)
        own = state(CUDA, fields, list(range(ROWS)))
        position = torch.tensor(fields["position"], device=CUDA)
        ids = torch.zeros(ROWS, dtype=torch.int32, device=CUDA)
        together(scores, rows, position, own, ids, full=True)
        alone = Sampler(1, VOCAB, CUDA)
        for row in range(0, ROWS, 41):
            part = slice(row, row + 1)
            one = torch.zeros(1, dtype=torch.int32, device=CUDA)
            alone(scores[part].clone(), rows[part].clone(), position[part].clone(), own, one, full=True)
            assert one.item() == ids[row].item()
            if fields["temperature"][row] > 0:
                assert torch.equal(alone._sums[0], together._sums[row])
                assert torch.equal(alone._floors[0], together._floors[row])

    def test_scores_are_those_of_torch(self, spread: float) -> None:
        """The same tokens, and log-probabilities within rounding."""
        scores, _ = many(spread)
        tokens = torch.arange(ROWS, device=CUDA) * 100
        got = Sampler(ROWS, VOCAB, CUDA).scores(scores, tokens, 20)
        logprobs = scores[:64].float().log_softmax(-1)
        want = Scores.of(logprobs, tokens[:64], 20)
        assert torch.equal(got.ids[:64], want.ids)
        torch.testing.assert_close(got.values[:64], want.values, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(got.chosen[:64], want.chosen, atol=1e-4, rtol=1e-5)

    def test_a_graph_gives_what_a_call_gives(self, spread: float) -> None:
        """Recorded once, replayed for other logits, parameters and positions."""
        scores, fields = many(spread)
        rows = torch.arange(ROWS, device=CUDA)
        sampler = Sampler(ROWS, VOCAB, CUDA)
        own = state(CUDA, fields, list(range(ROWS)))
        position = torch.tensor(fields["position"], device=CUDA)
        ids = torch.zeros(ROWS, dtype=torch.int32, device=CUDA)
        sampler(scores, rows, position, own, ids, full=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sampler(scores, rows, position, own, ids, full=True)
        position += 7
        scores.copy_(scores.flip(0).clone())
        own.top_k[::3] = 30
        graph.replay()
        replayed = ids.tolist()
        sampler(scores, rows, position, own, ids, full=True)
        assert ids.tolist() == replayed

    @pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 50}])
    def test_draws_follow_the_softmax(self, spread: float, fields: dict[str, Any]) -> None:
        """Chi-square over 64 × ROWS positions of one row, of the tokens it expects often enough and of its tiles."""
        scores, _ = many(spread)
        row = scores[5] if fields or spread > 1 else scores[5] * 3
        shared = row.expand(ROWS, -1).contiguous()
        sampler, counts = Sampler(ROWS, VOCAB, CUDA), torch.zeros(VOCAB, dtype=torch.int64)
        own = state(CUDA, {name: [value] * ROWS for name, value in fields.items()}, list(range(ROWS)))
        ids = torch.zeros(ROWS, dtype=torch.int32, device=CUDA)
        rows = torch.arange(ROWS, device=CUDA)
        for turn in range(64):
            sampler(shared, rows, rows + turn * ROWS, own, ids, full=bool(fields))
            counts += torch.bincount(ids.cpu(), minlength=VOCAB)
        kept = left(row[None].cpu(), {name: [value] for name, value in fields.items()})
        wanted = row.cpu().double().masked_fill(~kept[0], -torch.inf).softmax(-1)
        assert_follows(counts, wanted)
        tiles = torch.arange(VOCAB) // 512
        sums = [torch.zeros(251, dtype=torch.float64).index_add_(0, tiles, of.double()) for of in (counts, wanted)]
        assert_follows(sums[0], sums[1])
