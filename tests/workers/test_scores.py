"""Log-probabilities, against the log-softmax that transformers' logits have."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers import oracle, paged
from tests.workers.arithmetic import admit
from tests.workers.test_sampling import Identity, logits, rows
from toka.wire import LEAST_LOGPROB, NO_TOKEN, Logprobs, Plan, pack, unpack
from workers import memory
from workers.attention.paged_torch import PagedTorch
from workers.batch import build
from workers.head import TorchHead
from workers.kvcache import KVCache
from workers.outbox import HostOutbox, Sampled
from workers.sampling import choose
from workers.scores import Asked, Scores
from workers.slots import Slots
from workers.step import Step

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    oracle.save("llama", folder)
    return folder


class Worker:
    """A tiny Llama, and what its steps give back."""

    def __init__(self, folder: Path, processed: bool = False) -> None:
        model = paged.load(folder)
        cache = KVCache(model.config, 32, 4, torch.float32, paged.CPU)
        self.slots = Slots(4, 16, 32, 4, paged.CPU, model.config.vocab_size)
        head = TorchHead(model, self.slots, processed=processed)
        self.step = Step(model, PagedTorch(cache), self.slots, head)
        self.outbox = HostOutbox()

    @torch.inference_mode()
    def run(self, **fields: Any) -> Sampled:
        plan = Plan(epoch=0, step=0, **fields)
        self.slots.apply(plan)
        return self.outbox.send(0, self.step.run(build(plan, self.slots))).result()


def plain(scores: Logprobs) -> tuple[list[int], list[float], list[list[int]], list[list[float]]]:
    """Rows, chosen, ids, values."""
    count = len(scores.rows) // 4
    ids = np.frombuffer(scores.ids, "<i4").reshape(count, scores.width).tolist()
    values = np.frombuffer(scores.values, "<f4").reshape(count, scores.width).tolist()
    return unpack(scores.rows), np.frombuffer(scores.chosen, "<f4").tolist(), ids, values


def expected(tokens: list[int]) -> torch.Tensor:
    """float32[len(tokens), vocab]: the log-softmax after each token, by transformers."""
    return oracle.logits(oracle.build("llama"), tokens).log_softmax(-1)


def test_sampled_tokens_are_scored_by_the_raw_logits(folder: Path) -> None:
    """Before bias and temperature; rows that do not ask have none, and those that do say which they are."""
    worker = Worker(folder)
    shifted = {"bias_ids": pack([7]), "bias": np.array([100.0], "<f4").tobytes()}
    admits = [
        admit(0, [5, 6], [0, 1]),
        admit(1, PROMPT, [2, 3, 4], temperature=3.0, logprobs=3, **shifted),
        admit(2, [8], [5], logprobs=0),
    ]
    done = worker.run(admits=admits, chunks=pack([0, 0, 2, 1, 0, 9, 2, 0, 1]))
    tokens = unpack(done.ids)
    assert tokens[1] == 7
    assert done.logprobs is not None
    places, chosen, ids, values = plain(done.logprobs)
    assert places == [1, 2]
    assert done.logprobs.width == 3
    for row, prompt in ((0, PROMPT), (1, [8])):
        wanted = expected(prompt)[-1]
        assert chosen[row] == pytest.approx(float(wanted[tokens[row + 1]]), abs=1e-4)
        assert ids[row] == wanted.topk(3).indices.tolist()
        assert values[row] == pytest.approx(wanted.topk(3).values.tolist(), abs=1e-4)
    assert ids[1][0] == tokens[2]
    assert values[1][0] == chosen[1]
    assert worker.run(decode=pack([0])).logprobs is None


def test_a_dead_row_is_not_scored(folder: Path) -> None:
    """It has sampled nothing."""
    worker = Worker(folder)
    first = unpack(worker.run(admits=[admit(0, [5], [0], logprobs=1)], chunks=pack([0, 0, 1])).ids)
    again = [admit(0, [5], [0], logprobs=1, stops=first), admit(1, [9], [1], logprobs=1)]
    worker.run(releases=pack([0]), admits=again, chunks=pack([0, 0, 1, 1, 0, 1]), decode=b"")
    done = worker.run(decode=pack([0, 1]))
    assert unpack(done.ids)[0] == NO_TOKEN
    assert done.logprobs is not None
    assert plain(done.logprobs)[0] == [1]


@pytest.mark.parametrize("size", [1, 2, 4, 8, 9])
def test_prompts_are_scored_in_chunks(folder: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are cut and sliced: all tokens but the first, each once, as transformers scores them."""
    monkeypatch.setattr(memory, "MAX_LOGITS", 3 * 131)
    worker = Worker(folder)
    admits = [
        admit(0, [1, 2, 3, 4, 5], [0, 1]),
        admit(1, PROMPT, [2, 3, 4], prompt_logprobs=2, prompt_len=9),
    ]
    found: list[tuple[int, float, list[int], list[float]]] = []
    ranks: list[int] = []
    for start in range(0, 9, size):
        length = min(size, 9 - start)
        first = start == 0
        chunks = [*([0, 0, 5] if first else []), 1, start, length]
        done = worker.run(admits=admits if first else [], chunks=pack(chunks))
        assert [chunk for chunk, _ in done.prompts] == ([int(first)] if start < 8 else [])
        for _, scores in done.prompts:
            assert scores.width == 2
            found += zip(*plain(scores), strict=True)
            ranks += unpack(scores.ranks)
    assert [position for position, *_ in found] == list(range(1, 9))
    wanted = expected(PROMPT)
    for position, chosen, ids, values in found:
        assert chosen == pytest.approx(float(wanted[position - 1, PROMPT[position]]), abs=1e-4)
        best = wanted[position - 1].topk(2)
        assert ids == best.indices.tolist()
        assert values == pytest.approx(best.values.tolist(), abs=1e-4)
    owns = wanted[torch.arange(8), torch.tensor(PROMPT[1:])]
    assert ranks == ((wanted[:8] > owns[:, None]).sum(-1) + 1).tolist()


def test_the_answer_before_a_preemption_is_not_scored_as_prompt(folder: Path) -> None:
    """Only the first `prompt_len` ids are the client's; each chunk has the width of its own sequence."""
    worker = Worker(folder)
    admits = [
        admit(0, PROMPT, [2, 3, 4], prompt_logprobs=0, prompt_len=4),
        admit(1, [1, 2], [5], prompt_logprobs=5, prompt_len=2),
    ]
    prompts = worker.run(admits=admits, chunks=pack([0, 0, 9, 1, 0, 2])).prompts
    assert [(chunk, unpack(scores.rows), scores.width) for chunk, scores in prompts] == [(0, [1, 2, 3], 0), (1, [1], 5)]
    one = [admit(2, [1], [6], prompt_logprobs=5, prompt_len=1)]
    assert worker.run(admits=one, chunks=pack([2, 0, 1])).prompts == ()


def test_equals_come_by_their_ids() -> None:
    """Falling values, the lowest id first, −0 and 0 being equal; a sampled token has the same float in both places."""
    row = torch.tensor([[-1.0, -0.5, -0.5, -torch.inf, -0.0, 0.0, -0.5, -0.25]])
    scores = Scores.of(row, torch.tensor([2]), 8, ranked=True)
    assert scores.ids.tolist() == [[4, 5, 7, 1, 2, 6, 0, 3]]
    assert float(scores.chosen[0]) == float(scores.values[0, 4])
    assert scores.ranks.tolist() == [5]
    assert Scores.of(row, torch.tensor([2]), 50).ids.shape == (1, 8)
    assert Scores.of(torch.zeros(1, 5000), torch.tensor([9]), 20).ids.tolist() == [list(range(20))]


@pytest.mark.parametrize("vocab", [7, 300])
def test_a_rank_is_a_place_in_the_order_of_the_best(vocab: int) -> None:
    """Whatever is equal to what: the rank of a token is where it stands among all of them."""
    generator = torch.Generator().manual_seed(vocab)
    rows = torch.randint(-3, 3, (40, vocab), generator=generator).float()
    rows[:, 0] = -torch.inf
    tokens = torch.randint(0, vocab, (40,), generator=generator)
    scores = Scores.of(rows, tokens, vocab, ranked=True)
    places = [ids.index(token) + 1 for ids, token in zip(scores.ids.tolist(), tokens.tolist(), strict=True)]
    assert scores.ranks.tolist() == places


def test_what_is_impossible_is_the_least() -> None:
    """Scores are finite, whatever the logits."""
    scores = Scores.of(torch.tensor([[0.0, -torch.inf, -1e30, 0.0]]), torch.tensor([1]), 4)
    assert scores.chosen.tolist() == [LEAST_LOGPROB]
    assert scores.values.tolist()[0][2:] == [LEAST_LOGPROB] * 2


PROCESSED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.5},
    "greedy": {"temperature": 0.0},
    "top_k": {"temperature": 2.0, "top_k": 7},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.1},
    "bias": {"bias_ids": pack([7, 9]), "bias": np.array([2.0, -100.0], "<f4").tobytes()},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "temperature": 0.0},
    "allowed": {"allowed": pack([3, 5, 8]), "temperature": 0.0},
    "blocked": {"blocked": pack([1, 2]), "min_tokens": 3, "prompt_len": 9},
}


def processed(row: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
    """float32[vocab]: what a token behind PROMPT is drawn from, worked out one option at a time."""
    row = row.clone()
    if "bias" in fields:
        row[7] += 2
        row[9] -= 100
    if "repetition_penalty" in fields:
        row[PROMPT] = torch.where(row[PROMPT] < 0, row[PROMPT] * 1.5, row[PROMPT] / 1.5)
    for name, keep in (("allowed", True), ("blocked", False)):
        if name in fields:
            listed = torch.zeros(len(row), dtype=torch.bool)
            listed[unpack(fields[name])] = True
            row[listed != keep] = -torch.inf
    row /= fields["temperature"] or 1.0
    if "top_k" in fields:
        row[row < row.topk(7).values[-1]] = -torch.inf
    if "top_p" in fields:
        best = row.softmax(-1).sort(descending=True)
        row[best.indices[best.values.cumsum(-1) - best.values >= 0.6]] = -torch.inf
    if "min_p" in fields:
        row[row.softmax(-1) < 0.1 * row.softmax(-1).max()] = -torch.inf
    return row.log_softmax(-1).clamp(min=LEAST_LOGPROB)


def test_processed_scores_are_of_what_was_drawn_from(folder: Path) -> None:
    """Each option, all in one roster; raw ones are those of the model, whatever the options."""
    raw = oracle.logits(oracle.build("llama"), PROMPT)[-1]
    for name in PROCESSED:
        fields = {"prompt_len": 9, "temperature": 1.0} | PROCESSED[name]
        admits = [
            admit(0, PROMPT, [2, 3, 4], logprobs=131, **fields),
            admit(1, PROMPT, [5, 6, 7], logprobs=2, temperature=1.5, top_k=3, prompt_logprobs=1, prompt_len=9),
        ]
        for mode in (True, False):
            done = Worker(folder, processed=mode).run(admits=admits, chunks=pack([0, 0, 9, 1, 0, 9]))
            assert done.logprobs is not None
            _, chosen, ids, values = plain(done.logprobs)
            wanted = processed(raw, fields) if mode else raw.log_softmax(-1)
            found = torch.empty(131).scatter_(0, torch.tensor(ids[0]), torch.tensor(values[0]))
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4, msg=name)
            assert chosen[0] == found[unpack(done.ids)[0]]
            # Nobody drew the prompt.
            [(_, scores)] = done.prompts
            assert plain(scores)[1] == pytest.approx(
                expected(PROMPT)[torch.arange(8), torch.tensor(PROMPT[1:])].tolist(), abs=1e-4
            )


@pytest.mark.parametrize("mode", [False, True])
def test_slices_score_their_own_rows(mode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same scores, however few logits may exist at once; asking changes no token."""
    scores, parameters = logits(12), rows(12)
    host = np.array([1, 4, 5, 11])
    asked = Asked(host, torch.from_numpy(host), 3)
    whole = choose(Identity(), scores, parameters, asked=asked, processed=mode)
    assert torch.equal(whole.ids, choose(Identity(), scores, parameters).ids)
    assert whole.scores is not None
    chosen = scores.log_softmax(-1)[host].gather(1, whole.ids[host, None]).squeeze(1)
    torch.testing.assert_close(whole.scores.chosen, chosen)
    monkeypatch.setattr(memory, "MAX_LOGITS", 4 * 300)
    sliced = choose(Identity(), scores, parameters, asked=asked, processed=mode)
    assert sliced.scores is not None
    assert all(map(torch.equal, sliced.scores, whole.scores))
