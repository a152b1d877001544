"""Weights out of safetensors files, each straight into its place in the model."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.errors import WorkerError
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder, Layer
from workers.models.fields import read_json

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""
_ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_DUMMY_SEED = 0


def load(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Progress, load_format: str
) -> Decoder:
    """The model in `folder`, in `dtype` on `device`.

    `load_format`: `auto` or `safetensors`, which are the same today, or `dummy` for random weights without any file.
    Tensors are read and converted one at a time, so no more than one of them is in memory besides the model. Raises
    WorkerError for a file that is missing, truncated or corrupt, and for a tensor that is missing, of another shape, or
    unknown to the model. All that is checked before the first byte of a weight is read.
    """
    if load_format == "dummy":
        model = Decoder.empty(config, dtype, device)
        _randomise(model, progress)
        return model
    files = {path: read_header(path) for path in _files(folder)}
    wanted = _shapes(config)
    found = _match(folder, files, wanted, config)
    total = sum(files[path][name].size for name, path in found.items())
    model = Decoder.empty(config, dtype, device)
    done = 0
    progress(done, total)
    with ExitStack() as stack:
        readers = {path: stack.enter_context(_open(path)) for path in files}
        for name, place in places(model):
            path = found[name]
            try:
                place.copy_(readers[path].get_tensor(name))
            except (SafetensorError, OSError) as error:
                raise _damaged(path, f"{name} cannot be read: {error}") from error
            done += files[path][name].size
            progress(done, total)
    return model


def places(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a Hugging Face checkpoint by name, and the part of the model that holds it."""
    yield "model.embed_tokens.weight", model.embedding.weight
    for index, layer in enumerate(model.layers):
        for name, place in _layer_places(layer, model.config):
            yield f"model.layers.{index}.{name}", place
    yield "model.norm.weight", model.norm.weight
    if not model.config.tied_embeddings:
        yield "lm_head.weight", model.head_VC


def _layer_places(layer: Layer, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    attention, mlp = layer.attention, layer.mlp
    sizes = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
    yield "input_layernorm.weight", layer.attention.norm.weight
    for name, fused in (("weight", attention.qkv.weight), ("bias", attention.qkv.bias)):
        if fused is not None:
            for part, place in zip("qkv", torch.split(fused, sizes), strict=True):
                yield f"self_attn.{part}_proj.{name}", place
    if attention.q_norm is not None and attention.k_norm is not None:
        yield "self_attn.q_norm.weight", attention.q_norm.weight
        yield "self_attn.k_norm.weight", attention.k_norm.weight
    yield "self_attn.o_proj.weight", attention.output.weight
    if attention.output.bias is not None:
        yield "self_attn.o_proj.bias", attention.output.bias
    yield "post_attention_layernorm.weight", layer.mlp.norm.weight
    for name, fused in (("weight", mlp.gate_up.weight), ("bias", mlp.gate_up.bias)):
        if fused is not None:
            for part, place in zip(("gate", "up"), fused.chunk(2), strict=True):
                yield f"mlp.{part}_proj.{name}", place
    yield "mlp.down_proj.weight", mlp.down.weight
    if mlp.down.bias is not None:
        yield "mlp.down_proj.bias", mlp.down.bias


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a safetensors file."""

    shape: tuple[int, ...]
    dtype: str
    """As the format names it."""
    size: int
    """Bytes."""


def read_header(path: Path) -> dict[str, Entry]:
    """What a safetensors file holds. Raises WorkerError if the file is not exactly what its header says.

    The format: 8 bytes, little-endian: the header's length; the header: JSON, a tensor's dtype, shape and place by its
    name; the tensors. Reads the header only.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise _damaged(path, f"it ends after {size} bytes, before its header")
            if length > min(_MAX_HEADER, size - 8):
                raise _damaged(path, f"it claims a header of {length:,} bytes, and has {size:,} in all")
            raw = file.read(length)
    except FileNotFoundError:
        raise WorkerError(f"{path} is missing: download the model again") from None
    except OSError as error:
        raise WorkerError(f"{path} cannot be read: {error.strerror}") from error
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = {name: _entry(record) for name, record in header.items()}
        ends = [record["data_offsets"][1] for record in header.values()]
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _damaged(path, "its header is not that of a safetensors file") from error
    for name, entry in entries.items():
        itemsize = _ITEM_SIZES.get(entry.dtype)
        if itemsize is not None and entry.size != itemsize * math.prod(entry.shape):
            raise _damaged(path, f"{name} takes {entry.size:,} bytes, which {entry.dtype} {list(entry.shape)} does not")
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        state = "truncated: it" if size < expected else "too long: it"
        raise _damaged(path, f"it is {state} has {size:,} bytes, and its header says {expected:,}")
    return entries


def _entry(record: dict[str, object]) -> Entry:
    """Raises ValueError or TypeError for anything but a record of the format."""
    shape, dtype, offsets = record["shape"], record["dtype"], record["data_offsets"]
    if not (isinstance(shape, list) and isinstance(dtype, str) and isinstance(offsets, list)):
        raise TypeError
    start, end = offsets
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)) or start > end:
        raise ValueError
    return Entry(tuple(shape), dtype, end - start)


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a model, those of the index if there is one. Raises WorkerError."""
    index = folder / _INDEX
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
            raise WorkerError(f"{index} has no weight_map: download the model again")
        files = [folder / name for name in sorted(set(names.values()))]
        for path in files:
            if not path.is_file():
                raise WorkerError(f"shard {path} is missing, which {_INDEX} names: download the model again")
        return files
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if any(folder.glob("model-*-of-*.safetensors")):
        raise WorkerError(f"{index} is missing, without which the shards beside it cannot be read: download it too")
    raise WorkerError(
        f"{folder} has neither {_SINGLE} nor {_INDEX}: only safetensors are read. "
        "load_format=dummy makes random weights instead"
    )


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """What the checkpoint must hold."""
    outline = Decoder.empty(config, torch.float32, torch.device("meta"))
    return {name: tuple(place.shape) for name, place in places(outline)}


def _match(
    folder: Path, files: dict[Path, dict[str, Entry]], wanted: dict[str, tuple[int, ...]], config: ModelConfig
) -> dict[str, Path]:
    """The file that holds each wanted tensor. Raises WorkerError if one is missing, wrong or not wanted."""
    found: dict[str, Path] = {}
    for path, entries in files.items():
        for name, entry in entries.items():
            if name in found:
                raise WorkerError(f"{path} and {found[name]} both hold {name}: remove the file that is not the model's")
            if name not in wanted:
                # Older checkpoints store what follows from the config, and tied ones may store the embedding twice.
                if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings):
                    continue
                raise WorkerError(
                    f"{path} holds {name}, which {config.architecture} with this config.json does not use"
                )
            if entry.dtype not in _ITEM_SIZES:
                raise WorkerError(
                    f"{path}: {name} is stored as {entry.dtype}; supported are {', '.join(_ITEM_SIZES)}: "
                    "use a checkpoint that is not quantised"
                )
            if entry.shape != wanted[name]:
                raise WorkerError(
                    f"{path}: {name} has shape {list(entry.shape)}, and by config.json it must be {list(wanted[name])}"
                )
            found[name] = path
    missing = [name for name in wanted if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WorkerError(f"{folder} lacks the tensor {missing[0]}{more}: its safetensors do not hold the whole model")
    return found


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, what: str) -> WorkerError:
    return WorkerError(f"{path} is damaged: {what}. Download it again")


def _randomise(model: Decoder, progress: Progress) -> None:
    """Seeded weights of a spread that keeps activations near 1; norms do nothing, biases are 0."""
    parts = list(places(model))
    total = sum(place.numel() * place.element_size() for _, place in parts)
    generator = torch.Generator(model.head_VC.device).manual_seed(_DUMMY_SEED)
    done = 0
    progress(done, total)
    for name, place in parts:
        if name.endswith("norm.weight"):
            place.fill_(1)
        elif name.endswith("bias"):
            place.zero_()
        else:
            place.normal_(0, 0.02, generator=generator)
        done += place.numel() * place.element_size()
        progress(done, total)
