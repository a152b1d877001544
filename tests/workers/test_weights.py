"""Loading weights, and everything that can be wrong with them."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.workers import oracle, paged
from workers import weights
from workers.errors import WorkerError
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder

Tensors = dict[str, Tensor]
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in one file."""
    folder = tmp_path_factory.mktemp("llama")
    oracle.save("llama", folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    for name in ("config.json", SINGLE):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same in several files and an index."""
    oracle.save("llama", tmp_path, max_shard_size="60KB")
    assert len(shards(tmp_path)) > 2
    return tmp_path


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def load(folder: Path, load_format: str = "auto", dtype: torch.dtype = torch.float32) -> Decoder:
    config = ModelConfig.load(folder)
    return weights.load(folder, config, dtype, paged.CPU, lambda done, total: None, load_format)


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def refusal(folder: Path) -> str:
    """The one line that refuses to load."""
    with pytest.raises(WorkerError) as error:
        load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def equal(ours: Decoder, theirs: Tensors) -> bool:
    return all(torch.equal(place, theirs[name].to(place.dtype)) for name, place in weights.places(ours))


def test_every_tensor_lands_in_its_place(saved: Path) -> None:
    """Parts of fused weights are views of them, and all that transformers saved is used."""
    model, theirs = load(saved), load_file(saved / SINGLE)
    assert {name for name, _ in weights.places(model)} == set(theirs)
    assert equal(model, theirs)
    attention = model.layers[1].attention
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    assert torch.equal(attention.qkv.weight, torch.cat([theirs[name] for name in names]))


def test_shards_are_one_model(sharded: Path, saved: Path) -> None:
    """An index and its files give what one file gives."""
    assert equal(load(sharded), load_file(saved / SINGLE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_are_converted_one_by_one(folder: Path, dtype: torch.dtype) -> None:
    """To the dtype asked for, from whichever each of them has."""
    rewrite(folder, lambda tensors: tensors.update({Q: tensors[Q].double()}))
    model = load(folder, dtype=dtype)
    assert {place.dtype for _, place in weights.places(model)} == {dtype}
    assert equal(model, load_file(folder / SINGLE))


def test_progress_counts_bytes_up_to_all(saved: Path) -> None:
    """From 0 to the bytes of the checkpoint, upwards."""
    seen: list[tuple[int, int]] = []
    config = ModelConfig.load(saved)
    weights.load(saved, config, torch.float16, paged.CPU, lambda *at: seen.append(at), "safetensors")
    total = sum(tensor.nbytes for tensor in load_file(saved / SINGLE).values())
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert len(seen) > 20


def test_tensors_that_say_nothing_new_are_left_out(tmp_path: Path) -> None:
    """Stored frequencies, and the output projection of a tied model."""
    oracle.save("llama, tied", tmp_path)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "lm_head.weight": torch.zeros(131, 64),
    }
    rewrite(tmp_path, lambda tensors: tensors.update(extra))
    assert load(tmp_path).head_VC.any()


def test_dummy_weights_need_no_file(folder: Path) -> None:
    """Random, finite, the same each time, and of the config's shape."""
    (folder / SINGLE).unlink()
    first, second = load(folder, "dummy"), load(folder, "dummy")
    assert all(
        torch.equal(ours, others)
        for (_, ours), (_, others) in zip(weights.places(first), weights.places(second), strict=True)
    )
    logits = paged.Runner(first).step({"a": [1, 2, 3]})
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_dummy_weights_report_progress(folder: Path) -> None:
    """Up to all bytes of the model."""
    seen: list[tuple[int, int]] = []
    config = ModelConfig.load(folder)
    model = weights.load(folder, config, torch.bfloat16, paged.CPU, lambda *at: seen.append(at), "dummy")
    assert seen[-1] == (sum(place.nbytes for _, place in weights.places(model)),) * 2


def test_a_folder_without_weights(folder: Path) -> None:
    """The message names what is looked for."""
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").touch()
    assert f"has neither {SINGLE} nor {INDEX}: only safetensors are read" in refusal(folder)


def test_shards_without_an_index(sharded: Path) -> None:
    """The message names the index."""
    (sharded / INDEX).unlink()
    assert f"{INDEX} is missing" in refusal(sharded)


def test_a_missing_shard(sharded: Path) -> None:
    """The message names the file."""
    gone = shards(sharded)[1]
    gone.unlink()
    assert refusal(sharded) == f"shard {gone} is missing, which {INDEX} names: download the model again"


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": []}'])
def test_a_broken_index(sharded: Path, content: str) -> None:
    """The message names the index."""
    (sharded / INDEX).write_text(content, encoding="utf-8")
    assert INDEX in refusal(sharded)


@pytest.mark.parametrize("size", [0, 5, 8, 100, -1, -4000])
def test_a_truncated_file(sharded: Path, size: int) -> None:
    """Wherever it ends: before its header, in it, or behind it."""
    path = shards(sharded)[-1]
    content = path.read_bytes()
    path.write_bytes(content[:size])
    message = refusal(sharded)
    assert message.startswith(f"{path} is damaged: it ")
    assert message.endswith("Download it again")


def test_a_truncated_file_is_told_from_a_long_one(folder: Path) -> None:
    """Both sizes are named."""
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:-3])
    assert f"truncated: it has {len(content) - 3:,} bytes, and its header says {len(content):,}" in refusal(folder)
    (folder / SINGLE).write_bytes(content + b"abc")
    assert f"too long: it has {len(content) + 3:,} bytes, and its header says {len(content):,}" in refusal(folder)


@pytest.mark.parametrize("length", [2**63 + 1, 2**40, 200_000_000])
def test_a_nonsense_length_of_the_header_allocates_nothing(folder: Path, length: int) -> None:
    """It is compared with the size of the file before anything is read."""
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(struct.pack("<Q", length) + content[8:])
    assert f"it claims a header of {length:,} bytes" in refusal(folder)


def header(path: Path) -> tuple[dict[str, Any], bytes]:
    """A file's header and what follows it."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(path: Path, head: bytes, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


BROKEN_RECORDS: list[Any] = [
    None,
    [],
    {},
    {"dtype": "F32", "shape": [64]},
    {"dtype": "F32", "shape": [64], "data_offsets": [0]},
    {"dtype": "F32", "shape": [64], "data_offsets": [256, 0]},
    {"dtype": "F32", "shape": [-64], "data_offsets": [0, 256]},
    {"dtype": "F32", "shape": [6.4], "data_offsets": [0, 256]},
    {"dtype": 32, "shape": [64], "data_offsets": [0, 256]},
    {"dtype": "F32", "shape": [64], "data_offsets": "ab"},
]


@pytest.mark.parametrize("record", BROKEN_RECORDS, ids=str)
def test_a_broken_record_in_a_header(folder: Path, record: Any) -> None:
    """The file is named, whatever the record is."""
    head, data = header(folder / SINGLE)
    write(folder / SINGLE, json.dumps(head | {"model.norm.weight": record}).encode(), data)
    assert "its header is not that of a safetensors file" in refusal(folder)


@pytest.mark.parametrize("head", [b"{", b"[]", b"\xff\xff", b"nonsense", b"[" * 90_000])
def test_a_header_that_is_no_object(folder: Path, head: bytes) -> None:
    """The file is named."""
    write(folder / SINGLE, head, b"")
    assert f"{folder / SINGLE} is damaged: its header is not" in refusal(folder)


def test_a_record_whose_size_and_shape_differ(folder: Path) -> None:
    """The tensor is named."""
    head, data = header(folder / SINGLE)
    head["model.norm.weight"]["shape"] = [63]
    write(folder / SINGLE, json.dumps(head).encode(), data)
    assert "model.norm.weight takes 256 bytes, which F32 [63] does not" in refusal(folder)


def test_records_that_overlap(folder: Path) -> None:
    """Two tensors on the same bytes are damage, though each is well formed."""
    head, data = header(folder / SINGLE)
    head["model.norm.weight"]["data_offsets"] = head["model.layers.0.input_layernorm.weight"]["data_offsets"]
    write(folder / SINGLE, json.dumps(head).encode(), data)
    assert f"{folder / SINGLE} is damaged" in refusal(folder)


def test_a_missing_tensor(folder: Path) -> None:
    """The first is named, the others are counted."""
    rewrite(folder, lambda tensors: tensors.pop(Q))
    assert f"lacks the tensor {Q}: " in refusal(folder)
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert f"lacks the tensor {Q} and 1 more: " in refusal(folder)


def test_a_tensor_that_an_index_names_and_no_shard_holds(sharded: Path) -> None:
    """The index is not taken at its word."""
    path = shards(sharded)[-1]
    tensors = load_file(path)
    gone = next(iter(tensors))
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, path)
    assert f"lacks the tensor {gone}" in refusal(sharded)


def test_a_tensor_of_another_shape(folder: Path) -> None:
    """Both shapes are named."""
    rewrite(folder, lambda tensors: tensors.update({Q: tensors[Q][:-2].contiguous()}))
    assert f"{Q} has shape [126, 64], and by config.json it must be [128, 64]" in refusal(folder)


def test_a_tensor_of_integers(folder: Path) -> None:
    """A quantised checkpoint whose config does not say so."""
    rewrite(folder, lambda tensors: tensors.update({Q: tensors[Q].to(torch.int8)}))
    assert f"{Q} is stored as I8" in refusal(folder)


def test_a_tensor_that_the_config_does_not_use(folder: Path) -> None:
    """A bias that was left out silently would make every answer wrong."""
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(128)}))
    assert f"holds {name}, which LlamaForCausalLM with this config.json does not use" in refusal(folder)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    """It would be chance which one counts."""
    first, second = shards(sharded)[:2]
    tensors = load_file(second)
    name = next(iter(load_file(first)))
    save_file(tensors | {name: load_file(first)[name]}, second)
    assert f"both hold {name}" in refusal(sharded)


def test_a_file_that_may_not_be_read(folder: Path) -> None:
    """A folder in a file's place, for one, is named."""
    with pytest.raises(WorkerError, match="cannot be read"):
        weights.read_header(folder)
    with pytest.raises(WorkerError, match="is missing"):
        weights.read_header(folder / "none.safetensors")
