"""From Welcome to Ready: weights, KV cache, slots, and one pass over them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from toka.wire import Welcome
from workers import memory, weights
from workers.attention.paged_torch import PagedTorch
from workers.errors import WorkerError
from workers.kvcache import KVCache
from workers.models.config import ModelConfig
from workers.slots import Slots
from workers.step import Step

Progress = Callable[[str, int, int], None]
"""Called with the phase, what is done of it and what it is in all."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = ("raw", "processed")
"""What sampled tokens may be scored by."""
_WARM_TOKENS = 32
"""Tokens of the warm-up on a CPU: enough to touch every kernel once, few enough not to be waited for."""


@dataclass(frozen=True, slots=True)
class Started:
    """A worker that can run plans."""

    slots: Slots
    step: Step
    num_blocks: int
    max_model_len: int
    """Longest sequence the model takes, in tokens."""
    vocab_size: int


@torch.inference_mode()
def start(welcome: Welcome, device: torch.device, progress: Progress) -> Started:
    """Load what `welcome` names. Raises WorkerError, and torch.OutOfMemoryError or MemoryError where the plan of the
    memory was too bold."""
    if welcome.dtype not in DTYPES:
        raise WorkerError(f"dtype {welcome.dtype!r} is not supported. Supported: {', '.join(DTYPES)}")
    if welcome.logprobs_mode not in MODES:
        raise WorkerError(f"logprobs_mode {welcome.logprobs_mode!r} is not supported. Supported: {', '.join(MODES)}")
    dtype = DTYPES[welcome.dtype]
    folder = Path(welcome.model)
    config = ModelConfig.load(folder)
    model = weights.load(
        folder, config, dtype, device, lambda done, total: progress("weights", done, total), welcome.load_format
    )
    length = min(welcome.max_model_len or config.max_model_len, config.max_model_len)
    num_blocks = memory.num_blocks(
        config,
        memory.Room.of(device),
        itemsize=dtype.itemsize,
        page_size=welcome.page_size,
        utilization=welcome.memory_utilization,
        max_tokens=welcome.max_tokens,
        max_slots=welcome.max_slots,
        max_model_len=length,
        kv_tokens=welcome.kv_tokens,
    )
    cache = KVCache(config, num_blocks, welcome.page_size, dtype, device)
    max_blocks = min(-(-length // welcome.page_size), num_blocks)
    slots = Slots(welcome.max_slots, max_blocks, num_blocks, welcome.page_size, device, config.vocab_size)
    step = Step(model, PagedTorch(cache), slots, processed=welcome.logprobs_mode == "processed")
    _warm_up(step, welcome, length, device, progress)
    return Started(slots, step, num_blocks, config.max_model_len, config.vocab_size)


def _warm_up(step: Step, welcome: Welcome, length: int, device: torch.device, progress: Progress) -> None:
    """A chunk and a decode, so that the first request pays for no first time. On a GPU the largest there are, so that a
    worker which starts does not run out of memory later."""
    progress("warm-up", 0, 2)
    on_cpu = device.type == "cpu"
    tokens = min(welcome.max_tokens, _WARM_TOKENS) if on_cpu else welcome.max_tokens
    step.warm_up(tokens, rows=-(-tokens // length))
    progress("warm-up", 1, 2)
    step.warm_up(1 if on_cpu else welcome.max_slots, rows=1 if on_cpu else welcome.max_slots)
    progress("warm-up", 2, 2)
