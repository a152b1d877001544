"""How much memory each part takes, and how many blocks of KV cache the rest holds. Sizes are bytes. Imports torch only
to ask a GPU: a plan can be made before anything is loaded."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workers.errors import WorkerError
from workers.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

MAX_LOGITS = 8 * 2**20
"""Logits (rows × vocabulary) that exist at once while tokens are chosen."""
MAX_DEVICE_LOGITS = 128 * 2**20
"""The same on a GPU, where nothing but the logits themselves is held while tokens are chosen by the kernels."""
MAX_CHANGED_LOGITS = 32 * 2**20
"""The same on a GPU where something changes them first, or log-probabilities are asked for."""
MAX_GATHERED = 32 * 2**20
"""Bytes of keys and values that the torch attention copies out of the cache at once, unless one row needs more."""
MAX_QUERIES = 1024
"""Queries of one row that the torch attention takes at once."""
_BYTES_A_LOGIT = 44
"""The sampler's copies of a logit: float32 scaled and perturbed, the noise, what sorting takes, and the log-softmax."""
_MACHINE_SHARE = 0.5
"""Of a machine's free memory, the most that the KV cache takes unasked: other programs live there too."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of a device, once the weights are in it."""

    total: int
    free: int
    shared: bool
    """It is the machine's own memory, not a GPU's."""

    @classmethod
    def of(cls, device: "torch.device") -> "Room":
        """Ask the device."""
        if device.type == "cuda":
            import torch

            free, total = torch.cuda.mem_get_info(device)
            return cls(total=total, free=free, shared=False)
        return machine(Path("/proc/meminfo"), Path("/sys/fs/cgroup"))


def machine(meminfo: Path, cgroup: Path) -> Room:
    """The machine's memory by Linux's `meminfo`, or less where a control group allows less. Elsewhere than on Linux:
    its size, half of which counts as free."""
    try:
        lines = [line.split() for line in meminfo.read_text().splitlines()]
    except OSError:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Room(total=total, free=total // 2, shared=True)
    sizes = {line[0]: int(line[1]) * 1024 for line in lines if len(line) > 1}
    total, free = sizes["MemTotal:"], sizes["MemAvailable:"]
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _number(cgroup / limit_name), _number(cgroup / used_name)
        if limit is not None and used is not None and limit < total:
            # What is cached of files counts as used there, and is given back when somebody needs it.
            used -= _cached(cgroup / limit_name)
            total, free = limit, min(free, max(limit - used, 0))
    return Room(total=total, free=free, shared=True)


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Of all weights, at `itemsize` bytes an element."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    layer = hidden * (config.qkv_size + heads + 3 * config.intermediate_size) + 2 * hidden
    layer += config.qkv_bias * config.qkv_size + config.output_bias * hidden
    layer += config.mlp_bias * (2 * config.intermediate_size + hidden) + config.qk_norm * 2 * config.head_dim
    embeddings = config.vocab_size * hidden * (1 if config.tied_embeddings else 2)
    return itemsize * (config.num_layers * layer + embeddings + hidden)


def block_bytes(config: ModelConfig, page_size: int, itemsize: int) -> int:
    """Of one block of KV cache, over all layers."""
    return config.num_layers * 2 * page_size * config.num_kv_heads * config.head_dim * itemsize


def activation_bytes(config: ModelConfig, itemsize: int, max_tokens: int, max_slots: int, max_model_len: int) -> int:
    """The most that a step of `max_tokens` tokens in `max_slots` rows holds beside weights and KV cache."""
    heads = (config.num_heads + config.num_kv_heads) * config.head_dim
    residual = 3 * config.hidden_size
    attention = config.qkv_size + 3 * heads
    mlp = 4 * config.intermediate_size
    tokens = max_tokens * (itemsize * (residual + max(attention, mlp)) + 4 * 4 * config.head_dim)
    row = 2 * config.num_kv_heads * config.head_dim * max_model_len * itemsize
    masks = 4 * MAX_QUERIES * (MAX_QUERIES + max_model_len)
    logits = min(max_slots * config.vocab_size, max(MAX_LOGITS, config.vocab_size)) * _BYTES_A_LOGIT
    return tokens + max(row, MAX_GATHERED) + masks + logits


def num_blocks(
    config: ModelConfig,
    room: Room,
    *,
    itemsize: int,
    page_size: int,
    utilization: float,
    max_tokens: int,
    max_slots: int,
    max_model_len: int,
    kv_tokens: int,
    activations: int | None = None,
) -> int:
    """Blocks of KV cache to allocate, without the spare one.

    `room` is measured with the weights loaded. On a GPU, all that is in its memory stays within `utilization` of it; of
    a machine's own memory, KV cache and activations together take at most `utilization` of what is free. `kv_tokens`
    asks for so many tokens, rounded up to whole blocks; 0: what fits, though of a machine's own memory not more than
    half of what is free, and never more than `max_slots` sequences of `max_model_len` tokens fill. `max_model_len` 0:
    the model's own. `activations`: what the largest steps take, where that has been measured. Raises WorkerError if not
    even one block fits, or not the tokens asked for.
    """
    length = min(max_model_len or config.max_model_len, config.max_model_len)
    if activations is None:
        activations = activation_bytes(config, itemsize, max_tokens, max_slots, length)
    block = block_bytes(config, page_size, itemsize)
    share = utilization * room.free if room.shared else utilization * room.total - (room.total - room.free)
    fits = max((int(share) - activations) // block - 1, 0)
    if kv_tokens:
        wanted = -(-kv_tokens // page_size)
        if wanted > fits:
            raise WorkerError(
                f"a KV cache of {kv_tokens:,} tokens does not fit: {_room(room, utilization, activations)} leave room "
                f"for {fits * page_size:,} tokens. Lower kv_cache_num_tokens, or raise gpu_memory_utilization"
            )
        return wanted
    if room.shared:
        fits = min(fits, int(room.free * _MACHINE_SHARE) // block - 1)
    if fits < 1:
        raise WorkerError(
            f"no block of KV cache fits: {_room(room, utilization, activations)} leave nothing. Free some memory, "
            "raise gpu_memory_utilization, or lower max_tokens_per_forward"
        )
    return min(fits, max_slots * -(-length // page_size))


def _room(room: Room, utilization: float, activations: int) -> str:
    gib = 2**30
    step = f"{activations / gib:.1f} for a step,"
    if room.shared:
        return f"{utilization:g} of the {room.free / gib:.1f} GiB that are free, less {step}"
    return f"{utilization:g} of {room.total / gib:.1f} GiB, less {(room.total - room.free) / gib:.1f} in use and {step}"


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _cached(limit: Path) -> int:
    """Bytes of file cache that a control group could give back, by the `memory.stat` beside its limit."""
    try:
        lines = (limit.parent / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
