"""The memory plan's arithmetic."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers import oracle
from tests.workers.attention.test_paged_torch import CONFIG
from workers import memory
from workers.errors import WorkerError
from workers.memory import Room
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder

GIB = 2**30
BLOCK = memory.block_bytes(CONFIG, 16, 4)
ACTIVATIONS = memory.activation_bytes(CONFIG, 4, 64, 8, 512)
DEFAULTS: dict[str, Any] = {
    "itemsize": 4,
    "page_size": 16,
    "utilization": 0.9,
    "max_tokens": 64,
    "max_slots": 8,
    "max_model_len": 0,
    "kv_tokens": 0,
}


def fit(room: Room, **changes: Any) -> int:
    return memory.num_blocks(CONFIG, room, **(DEFAULTS | changes))


def gpu(blocks: float, used: int = 0) -> Room:
    """A GPU on which so many blocks, the spare one included, fit at 0.9."""
    total = round((blocks * BLOCK + ACTIVATIONS + used) / 0.9) + 1
    return Room(total=total, free=total - used, shared=False)


def test_a_block_holds_keys_and_values_of_every_layer() -> None:
    """2 layers × (key, value) × 16 tokens × 2 heads × 8 numbers × 4 bytes."""
    assert BLOCK == 2 * 2 * 16 * 2 * 8 * 4


@pytest.mark.parametrize("name", list(oracle.MODELS))
def test_weights_are_counted_to_the_byte(name: str, tmp_path: Path) -> None:
    """The formula gives what transformers' parameters and our tensors take."""
    theirs = oracle.build(name)
    theirs.config.architectures = [type(theirs).__name__]
    theirs.config.save_pretrained(tmp_path)
    config = ModelConfig.load(tmp_path)
    assert memory.weight_bytes(config, 4) == sum(parameter.nbytes for parameter in theirs.parameters())
    assert memory.weight_bytes(config, 2) * 2 == memory.weight_bytes(config, 4)


def test_a_gpu_gives_its_share_less_what_is_used_and_a_step_takes() -> None:
    """utilization · total − used − activations, in whole blocks, one of them spare."""
    assert fit(gpu(101)) == 100
    assert fit(gpu(101.9)) == 100
    assert fit(gpu(101, used=5 * GIB)) == 100
    assert fit(gpu(101), utilization=0.899) < 100


def test_no_more_than_all_slots_can_use() -> None:
    """max_slots sequences of max_model_len tokens; 0 and more than the model takes mean the model's own limit."""
    room = Room(total=64 * GIB, free=64 * GIB, shared=False)
    assert fit(room) == 8 * 512 // 16
    assert fit(room, max_model_len=100_000) == 8 * 512 // 16
    assert fit(room, max_model_len=33, max_slots=5) == 5 * 3


def test_a_machine_keeps_half_of_its_free_memory_for_others() -> None:
    """The KV cache takes no more of it unless it is told how much to take."""
    room = Room(total=100 * GIB, free=GIB, shared=True)
    half = GIB // 2 // BLOCK - 1
    assert fit(room, max_slots=16384) == half
    assert fit(room, max_slots=16384, utilization=0.25) < half // 2
    assert fit(room, kv_tokens=(half + 1000) * 16) == half + 1000
    with pytest.raises(WorkerError, match=r"0\.9 of the 1\.0 GiB that are free"):
        fit(room, kv_tokens=half * 2 * 16)


def test_tokens_asked_for_become_whole_blocks() -> None:
    """Even more than the slots can use."""
    assert fit(gpu(101), kv_tokens=33) == 3
    assert fit(gpu(1001), kv_tokens=16_000) == 1000


def test_tokens_that_do_not_fit_are_refused_with_what_does() -> None:
    """The message gives the number that would have fitted."""
    with pytest.raises(WorkerError, match=r"a KV cache of 1,601 tokens does not fit: .* room for 1,600 tokens"):
        fit(gpu(101), kv_tokens=1601)
    assert fit(gpu(101), kv_tokens=1600) == 100


@pytest.mark.parametrize("room", [gpu(1), Room(GIB, 0, True), Room(GIB, ACTIVATIONS, True)])
def test_no_room_at_all_is_refused(room: Room) -> None:
    """A worker that could not hold one block does not start."""
    with pytest.raises(WorkerError, match="no block of KV cache fits"):
        fit(room)


def test_more_tokens_and_slots_need_more_room() -> None:
    """Activations grow with the step, and logits stop growing where they are sliced."""
    base = memory.activation_bytes(CONFIG, 4, 64, 8, 512)
    assert memory.activation_bytes(CONFIG, 4, 128, 8, 512) > base
    assert memory.activation_bytes(CONFIG, 4, 64, 9, 512) > base
    many = memory.activation_bytes(CONFIG, 4, 64, 10**6, 512)
    assert many == memory.activation_bytes(CONFIG, 4, 64, 10**7, 512)


MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    9000000 kB\nHugePages_Total: 0\n"


def test_the_machine_is_read_from_meminfo(tmp_path: Path) -> None:
    """Available memory counts, which includes what the system caches."""
    (tmp_path / "meminfo").write_text(MEMINFO, encoding="utf-8")
    room = memory.machine(tmp_path / "meminfo", tmp_path / "none")
    assert room == Room(total=16_000_000 * 1024, free=9_000_000 * 1024, shared=True)


@pytest.mark.parametrize(
    ("limit", "used"),
    [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
def test_a_control_group_can_allow_less(tmp_path: Path, limit: str, used: str) -> None:
    """In a container its limit is the memory there is; file cache inside it is given back when needed."""
    (tmp_path / "meminfo").write_text(MEMINFO, encoding="utf-8")
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).write_text(f"{4 * GIB}\n", encoding="utf-8")
    (tmp_path / used).write_text(f"{3 * GIB}\n", encoding="utf-8")
    assert memory.machine(tmp_path / "meminfo", tmp_path) == Room(4 * GIB, GIB, True)
    (tmp_path / limit).with_name("memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n", encoding="utf-8")
    assert memory.machine(tmp_path / "meminfo", tmp_path) == Room(4 * GIB, 2 * GIB, True)


def test_a_control_group_without_a_limit_changes_nothing(tmp_path: Path) -> None:
    """`max`, or a limit above the machine's memory."""
    (tmp_path / "meminfo").write_text(MEMINFO, encoding="utf-8")
    for limit in ("max\n", str(2**63)):
        (tmp_path / "memory.max").write_text(limit, encoding="utf-8")
        (tmp_path / "memory.current").write_text("5\n", encoding="utf-8")
        assert memory.machine(tmp_path / "meminfo", tmp_path).total == 16_000_000 * 1024


def test_this_machine_has_memory() -> None:
    """Asking the real device works."""
    room = Room.of(torch.device("cpu"))
    assert 0 < room.free <= room.total
    assert room.shared


def test_the_outline_of_a_model_takes_no_memory() -> None:
    """On the meta device a model of any size can be counted."""
    model = Decoder.empty(CONFIG, torch.float32, torch.device("meta"))
    assert model.head_VC.is_meta
