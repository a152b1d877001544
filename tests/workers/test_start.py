"""From Welcome to Ready, with a tiny model."""

from pathlib import Path

import pytest
import torch

from tests.fakes import write_tiny_model
from toka.wire import Plan, Welcome
from workers.batch import build
from workers.errors import WorkerError
from workers.start import largest, start


def welcome(folder: Path, **fields: object) -> Welcome:
    usual: dict[str, object] = {
        "epoch": 1,
        "rank": 0,
        "results": "",
        "plans": "",
        "model": str(folder),
        "dtype": "float32",
        "load_format": "dummy",
        "page_size": 16,
        "max_slots": 4,
        "max_tokens": 64,
        "max_model_len": 0,
        "kv_tokens": 0,
        "memory_utilization": 0.9,
        "max_ahead": 4,
    }
    return Welcome(**(usual | fields))  # type: ignore[arg-type]  # each test gives fields of a Welcome


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path, weights=False)


def quiet(phase: str, done: int, total: int) -> None:
    pass


CPU = torch.device("cpu")


def test_it_says_how_far_it_has_come(folder: Path) -> None:
    """Phases in their order, each up to its end."""
    told: list[tuple[str, bool]] = []
    start(welcome(folder, kv_tokens=64), CPU, lambda phase, done, total: told.append((phase, done == total)))
    assert list(dict(told)) == ["weights", "warm-up"]
    assert dict(told) == {"weights": True, "warm-up": True}


def test_the_engine_may_say_how_large_the_cache_is(folder: Path) -> None:
    """`kv_tokens` in whole blocks; the tables are as wide as the longest sequence, or as the whole cache."""
    started = start(welcome(folder, kv_tokens=100 * 16), CPU, quiet)
    assert (started.num_blocks, started.max_model_len, started.vocab_size) == (100, 2048, 259)
    assert started.slots.tables.shape == (5, 100)
    assert start(welcome(folder, kv_tokens=1600, max_model_len=40), CPU, quiet).slots.tables.shape == (5, 3)


def test_what_fits_is_enough_for_every_slot(folder: Path) -> None:
    """Without a size, a small model gets all the blocks its slots could ever fill."""
    assert start(welcome(folder), CPU, quiet).num_blocks == 4 * 2048 // 16


def test_what_was_allocated_while_loading_is_written_by_the_loop(folder: Path) -> None:
    """Both run in inference mode, whose tensors nobody else may change."""
    started = start(welcome(folder, kv_tokens=64), CPU, quiet)
    plan = Plan(epoch=1, step=0, decode=b"")
    with torch.inference_mode():
        started.slots.apply(plan)
        assert len(started.step.run(build(plan, started.slots)).ids) == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not supported. Supported: float32, bfloat16, float16"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode 'raw_logits' is not supported. Supported: raw, processed"),
        ({"kv_tokens": 10**12}, "does not fit"),
        ({"load_format": "safetensors"}, "model.safetensors"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(folder: Path, fields: dict[str, object], words: str) -> None:
    """It says what is wrong and what would do."""
    with pytest.raises(WorkerError, match=words) as caught:
        start(welcome(folder, **fields), CPU, quiet)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("max_slots", [1, 3, 40, 4096])
@pytest.mark.parametrize("max_tokens", [4, 2000, 8192])
@pytest.mark.parametrize("length", [2, 100, 131072])
def test_the_steps_that_are_measured_are_steps_that_there_are(max_slots: int, max_tokens: int, length: int) -> None:
    """They have no more rows than slots, nor rows longer than a sequence; and no step has more tokens."""
    found = largest(welcome(Path(), max_slots=max_slots, max_tokens=max_tokens), length)
    for tokens, rows in found:
        assert 0 < rows <= max_slots
        assert rows <= tokens <= rows * length
    assert found[0][0] == min(max_tokens, max_slots * length)
    assert found[1] == (max_slots, max_slots)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "fields",
    [
        {"max_slots": 1},
        {"max_slots": 2, "max_model_len": 8},
        {"max_slots": 2, "max_model_len": 40, "kv_tokens": 1, "page_size": 1},
        {"max_slots": 4, "max_tokens": 4, "hydragen": True},
        {"max_slots": 40, "max_model_len": 100, "attention": "torch"},
    ],
)
def test_a_small_worker_starts_on_a_gpu(folder: Path, fields: dict[str, object]) -> None:
    """One slot; fewer tokens in all slots than in a step; a sequence shorter than a page; a cache of one block."""
    start(welcome(folder, **({"max_tokens": 8192, "kv_tokens": 4096} | fields)), torch.device("cuda"), quiet)
