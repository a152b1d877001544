"""The decoder against transformers, over every architecture and flag."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.workers import oracle, paged
from workers.errors import WorkerError
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


@pytest.mark.parametrize("said", [True, False, None])
@pytest.mark.parametrize("stored", [True, False])
def test_b85_the_output_projection_is_the_configs_choice(tmp_path: Path, said: bool | None, stored: bool) -> None:
    """Tied: the embedding, whether the file has a projection or not. Untied, as transformers has it for a config that
    says nothing: the file's own, and without one the model is refused."""
    tied = said is True
    theirs = oracle.save("llama, tied" if tied else "llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    if stored:
        own = torch.full_like(theirs.lm_head.weight, 7.0) if tied else theirs.lm_head.weight.detach()
        tensors["lm_head.weight"] = own.contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(config | ({} if said is None else {"tie_word_embeddings": said})))
    if not tied and not stored:
        with pytest.raises(WorkerError, match=r"lm_head\.weight"):
            paged.load(tmp_path)
        return
    ours = paged.Runner(paged.load(tmp_path)).step({"c": C})
    close(ours.log_softmax(-1), oracle.logits(theirs, C).log_softmax(-1))
