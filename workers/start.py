"""From Welcome to Ready: weights, KV cache, slots, and one pass over them."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from toka.wire import Welcome
from workers import memory, weights
from workers.attention.base import Attention
from workers.attention.select import select
from workers.batch import assemble_decode
from workers.errors import WorkerError
from workers.graphs import Graphs
from workers.head import DeviceHead, TorchHead
from workers.kvcache import KVCache
from workers.mixed import MOST, Laid, Mixed
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.recording import Recorder
from workers.slots import Slots
from workers.step import Step

log = logging.getLogger("worker")

Progress = Callable[[str, int, int], None]
"""Called with the phase, what is done of it and what it is in all."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = ("raw", "processed")
"""What sampled tokens may be scored by."""
_WARM_TOKENS = 32
"""Tokens of the warm-up on a CPU: enough to touch every kernel once, few enough not to be waited for."""
_GRAPHS = 512 * 2**20
"""Bytes that the driver takes for recorded graphs, beside what they compute with."""


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
    builder = _Builder(welcome, config, model, dtype, device, length)
    on_gpu = device.type == "cuda"
    measured = _measure(builder, progress) if on_gpu else None
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
        activations=measured,
    )
    slots, attention = builder.around(num_blocks, min(builder.blocks(length), num_blocks))
    if on_gpu:
        step = builder.on_gpu(slots, attention, progress)
    else:
        step = Step(model, attention, slots, TorchHead(model, slots, builder.processed))
        progress("warm-up", 0, 1)
        step.warm_up(min(welcome.max_tokens, length, _WARM_TOKENS, num_blocks * welcome.page_size), rows=1)
        progress("warm-up", 1, 1)
    return Started(slots, step, num_blocks, config.max_model_len, config.vocab_size)


@dataclass(frozen=True, slots=True)
class _Builder:
    """What everything else is built from."""

    welcome: Welcome
    config: ModelConfig
    model: Decoder
    dtype: torch.dtype
    device: torch.device
    length: int
    """Longest sequence that is served, in tokens."""

    def around(self, num_blocks: int, max_blocks: int) -> tuple[Slots, Attention]:
        """Slots and attention around a KV cache of so many blocks, of which a sequence has at most `max_blocks`."""
        welcome, config = self.welcome, self.config
        cache = KVCache(config, num_blocks, welcome.page_size, self.dtype, self.device)
        slots = Slots(welcome.max_slots, max_blocks, num_blocks, welcome.page_size, self.device, config.vocab_size)
        rows = max(welcome.max_slots, self.mixed)
        attention = select(welcome.attention, cache, config, rows, hydragen=welcome.hydragen)
        if attention.tiles is not None:
            slots.share(attention.tiles)
        return slots, attention

    @property
    def processed(self) -> bool:
        """Sampled tokens are scored by what they were drawn from."""
        return self.welcome.logprobs_mode == "processed"

    @property
    def records(self) -> bool:
        """Steps are recorded. Those of the torch attention cannot be: it reads lengths on the host."""
        return self.welcome.cuda_graphs and self.welcome.attention != "torch"

    @property
    def mixed(self) -> int:
        """Tokens of the largest mixed step that may be recorded."""
        return min(MOST, self.welcome.max_tokens)

    def blocks(self, tokens: int) -> int:
        """So many hold them."""
        return -(-tokens // self.welcome.page_size)

    def head(self, slots: Slots) -> DeviceHead:
        """For a GPU."""
        from workers.kernels.sample import Sampler

        sampler = Sampler(self.welcome.max_slots, self.config.vocab_size, self.device)
        return DeviceHead(self.model, slots, sampler, processed=self.processed)

    def on_gpu(self, slots: Slots, attention: Attention, progress: Progress) -> Step:
        """The step, its decoding recorded where the engine wants that."""
        from workers.attention.paged import Paged

        head = self.head(slots)
        step = Step(self.model, attention, slots, head)
        if not self.records:
            if self.welcome.cuda_graphs:
                log.info("attention_backend=torch: steps are not recorded as CUDA graphs")
            return step
        assert isinstance(attention, Paged), "on a GPU all are but torch"

        def laid(step: Laid) -> Tensor:
            attention.plan_laid(step)
            return self.model.forward(step.tokens, step.positions, attention)

        began = time.perf_counter()
        size, recorder = self.config.hidden_size, Recorder(self.device)
        mixed = None
        if attention.lays:
            mixed = Mixed(slots, size, self.dtype, attention.queries, attention.list_tiles, self.mixed)
            mixed.record(recorder, laid, lambda done, total: progress("graphs of mixed steps", done, total))
        graphs = Graphs(slots, size, self.dtype, self.welcome.max_slots, attention.tiles)
        graphs.record(
            recorder,
            forward=lambda rows, shared: step.forward(assemble_decode(rows, slots, None, shared)),
            sample=head.choose,
            replan=lambda rows, bounds: attention.replan(rows, slots.tables, bounds),
            progress=lambda done, total: progress("graphs", done, total),
        )
        # What the runs before each recording took is no longer needed.
        torch.cuda.empty_cache()
        log.info("recorded %d graphs in %.1f s", recorder.count, time.perf_counter() - began)
        return Step(self.model, attention, slots, head.recorded(graphs), graphs, mixed)


def _measure(builder: _Builder, progress: Progress) -> int:
    """Bytes that the largest steps take beside weights and KV cache: they are run once, over a cache of one block."""
    before = torch.cuda.memory_allocated()
    slots, attention = builder.around(1, builder.blocks(builder.length))
    step = Step(builder.model, attention, slots, builder.head(slots))
    peaks = []
    steps = largest(builder.welcome, builder.length)
    for done, (tokens, rows) in enumerate(steps):
        progress("warm-up", done, len(steps))
        torch.cuda.reset_peak_memory_stats()
        step.warm_up(tokens, rows)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    progress("warm-up", len(steps), len(steps))
    del slots, attention, step
    torch.cuda.empty_cache()
    # Recorded steps have memory of their own: that of the largest, which the smaller ones share.
    recorded = max(peaks[1:]) + _GRAPHS if builder.records else 0
    log.debug("the largest steps take %.2f, %.2f and %.2f GiB", *(peak / 2**30 for peak in peaks))
    return max(peaks) + recorded


def largest(welcome: Welcome, length: int) -> list[tuple[int, int]]:
    """The steps to measure, (tokens, rows) each: that of most tokens, that of most rows, and of the mixed ones that are
    recorded that of most tokens. `length`: tokens of the longest sequence."""

    def filled(tokens: int) -> tuple[int, int]:
        """As many tokens, in as few rows, as there can be."""
        tokens = min(tokens, welcome.max_slots * length)
        return tokens, -(-tokens // length)

    slots = welcome.max_slots
    return [filled(welcome.max_tokens), (slots, slots), filled(min(MOST, welcome.max_tokens))]
