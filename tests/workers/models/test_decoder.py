"""The decoder against transformers, over every architecture and flag."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.workers import oracle, paged
from workers.models.config import FAMILIES

A = [5, 130, 0, 77, 3, 9, 12, 64, 31, 2, 8]
B = [42, 42, 1]
C = [*range(20, 70)]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.fixture(params=list(oracle.MODELS))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[paged.Runner, PreTrainedModel]:
    """Our model over pages, and transformers' own."""
    theirs = oracle.save(request.param, tmp_path)
    return paged.Runner(paged.load(tmp_path)), theirs


def test_every_architecture_is_compared() -> None:
    """A family that is added to the table is added to the oracle's models too."""
    types = {fields["type"] for fields in oracle.MODELS.values()}
    assert types == {family.model_type for family in FAMILIES.values()}


def test_prefill_in_one_chunk(pair: tuple[paged.Runner, PreTrainedModel]) -> None:
    """Logits of a whole prompt are transformers'."""
    ours, theirs = pair
    close(ours.step({"c": C}), oracle.logits(theirs, C))


def test_prefill_in_several_chunks(pair: tuple[paged.Runner, PreTrainedModel]) -> None:
    """A chunk sees the chunks before it, wherever a border falls in a block."""
    ours, theirs = pair
    parts = [ours.step({"c": C[first:last]}) for first, last in ((0, 7), (7, 8), (8, 24), (24, 50))]
    close(torch.cat(parts), oracle.logits(theirs, C))


def test_ragged_rows_share_a_step(pair: tuple[paged.Runner, PreTrainedModel]) -> None:
    """Chunks and decoding rows of different lengths run together, and each as if it were alone."""
    ours, theirs = pair
    ours.step({"a": A[:-2], "c": C[:40]})
    mixed = ours.step({"b": B, "c": C[40:]}, {"a": A[-2]})
    want = [oracle.logits(theirs, B), oracle.logits(theirs, C)[40:], oracle.logits(theirs, A[:-1])[-1:]]
    close(mixed, torch.cat(want))
    decoded = ours.step({}, {"c": 4, "a": A[-1], "b": 9})
    want = [oracle.logits(theirs, row)[-1:] for row in ([*C, 4], A, [*B, 9])]
    close(decoded, torch.cat(want))


def test_greedy_generation(pair: tuple[paged.Runner, PreTrainedModel]) -> None:
    """Greedy tokens of rows that run together are those of transformers' forward pass over each whole row."""
    ours, theirs = pair
    rows = {"a": list(A), "b": list(B)}
    ids = ours.step(rows)[[len(A) - 1, len(A) + len(B) - 1]].argmax(-1).tolist()
    for _ in range(12):
        for row, token in zip(rows.values(), ids, strict=True):
            assert token == oracle.logits(theirs, row)[-1].argmax()
            row.append(token)
        ids = ours.step({}, dict(zip(rows, ids, strict=True))).argmax(-1).tolist()


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    """A tied output projection takes no memory of its own."""
    oracle.save("llama, tied", tmp_path)
    model = paged.load(tmp_path)
    assert model.head_VC is model.embedding.weight


def test_half_precision_stays_near_float32(tmp_path: Path) -> None:
    """In bfloat16 the logits leave as float32 and are those of float32 up to rounding."""
    theirs = oracle.save("llama", tmp_path)
    logits = paged.Runner(paged.load(tmp_path, torch.bfloat16)).step({"c": C})
    assert logits.dtype == torch.float32
    reference = oracle.logits(theirs, C)
    assert (logits - reference).std() < 0.05 * reference.std()
