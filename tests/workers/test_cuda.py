"""The worker's model side on a GPU, plainly: what the CPU computes."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.workers import oracle, paged
from tests.workers.test_sampling import MIXED, logits, rows
from workers import noise
from workers.memory import Room
from workers.sampling import sample

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", list(oracle.MODELS))
def test_the_logits_of_the_cpu(name: str, tmp_path: Path) -> None:
    """Chunks, chunks with a past and ragged decodes, in float32; the bound is for the GPU's own order of sums."""
    oracle.save(name, tmp_path)
    cpu, cuda = paged.Runner(paged.load(tmp_path)), paged.Runner(paged.load(tmp_path, device=CUDA))
    for chunks, decodes in (
        ({"a": range(30), "b": [7]}, {}),
        ({"a": range(40, 50)}, {"b": 9}),
        ({}, {"b": 3, "a": 4}),
    ):
        want, got = cpu.step(chunks, decodes), cuda.step(chunks, decodes)
        torch.testing.assert_close(got.cpu(), want, atol=1e-3, rtol=1e-3)


def test_the_noise_of_the_cpu() -> None:
    """Word for word."""
    seed, choice, position = (torch.tensor(MIXED[name]) for name in ("seed", "choice", "position"))
    first = torch.arange(len(seed)) * 512
    for lane in (noise.TOKENS, noise.TILES):
        want = noise.words_numpy(seed.numpy(), choice.numpy(), position.numpy(), first.numpy(), 1003, lane)
        got = noise.words_torch(seed.to(CUDA), choice.to(CUDA), position.to(CUDA), first.to(CUDA), 1003, lane)
        assert got.cpu().tolist() == want.tolist()


def test_the_tokens_of_the_cpu() -> None:
    """Every way to choose; rows whose two best tokens are nearer than rounding do not occur here."""
    for seed in range(20):
        scores, parameters = logits(10, seed=seed), rows(10, **MIXED)
        on_cuda = {name: getattr(parameters, name).to(CUDA) for name in MIXED}
        moved = dataclasses.replace(parameters, **on_cuda)
        assert sample(scores.to(CUDA), moved).tolist() == sample(scores, parameters).tolist()


def test_the_room_of_a_gpu() -> None:
    """Its own memory, shared with nobody."""
    room = Room.of(CUDA)
    assert 0 < room.free <= room.total
    assert not room.shared
