"""Times the halves of attention on a GPU, over Llama's heads (32, and 8 for keys and values), page 16, bfloat16.

    python bench/attention.py                               decode and prefill, Triton, heads of 64 and 128
    python bench/attention.py backend=flashinfer half=prefill
    python bench/attention.py sweep=T half=decode sizes=64  which tuning of the Triton kernels is best
    python bench/attention.py cases=30k,ragged              only cases with such names

A layer call's time is the median over replays of a CUDA graph of many calls, each on a layer of its own, so that
together they read more than the second-level cache holds. A row of the table: µs a call, and for decode the share of
the bandwidth that a large copy reaches, for prefill TFLOP/s counted on the causal half.
"""

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from msgspec import Meta, Struct
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from toka.errors import TokaError
from toka.options import build, from_words, help_lines
from workers.attention.base import Half
from workers.attention.flashinfer_decode import FlashInferDecode
from workers.attention.flashinfer_prefill import FlashInferPrefill
from workers.attention.triton_decode import TritonDecode
from workers.attention.triton_prefill import TritonPrefill
from workers.batch import Batch
from workers.kernels import decode, prefill
from workers.kvcache import KVCache
from workers.models.config import ModelConfig
from workers.models.fields import Fields

HEADS, KV_HEADS, PAGE = 32, 8, 16
DTYPE = torch.bfloat16
ROTATED = 256 * 2**20
"""Bytes that the calls of a graph read together, at least."""
MAX_LAYERS = 64
REPLAYS = 20


class Case(NamedTuple):
    """Rows that decode, or chunks at the ends of rows."""

    name: str
    lengths: list[int]
    """Keys of each row, the step's own included."""
    sizes: list[int]
    """Tokens of each chunk; none: the rows decode."""

    def pairs(self) -> int:
        """Query and key pairs of all chunks."""
        chunks = zip(self.lengths, self.sizes, strict=True)
        return sum(size * (length - size) + size * (size + 1) // 2 for length, size in chunks)


def ragged(count: int, mean: float, sigma: float, most: int, seed: int) -> list[int]:
    """Lengths as conversations have them."""
    drawn = np.random.default_rng(seed).lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    return [int(length) for length in np.clip(drawn, 2, most)]


def chunks(name: str, count: int, length: int, size: int) -> Case:
    return Case(name, [length] * count, [size] * count)


DECODE = [
    *(Case(f"{count} x 1k", [1024] * count, []) for count in (1, 16, 64, 256, 1024)),
    Case("256 ragged 16..2031", np.random.default_rng(0).integers(16, 2032, 256).tolist(), []),
    Case("1024 ragged mean 298", ragged(1024, 298, 1.0, 3072, 0), []),
    Case("1 x 8k", [8192], []),
    Case("1 x 32k", [32768], []),
    Case("8 x 8k", [8192] * 8, []),
    Case("one of 30k + 63 x 256", [256] * 31 + [30_000] + [256] * 32, []),
    Case("1024 x 192", [192] * 1024, []),
    Case("256 x 128", [128] * 256, []),
]
PREFILL = [
    chunks("1 x 8192", 1, 8192, 8192),
    chunks("8 x 1024", 8, 1024, 1024),
    chunks("32 x 256", 32, 256, 256),
    chunks("last 512 of 4096", 1, 4096, 512),
    chunks("16 x last 512 of 4096", 16, 4096, 512),
]


class Options(Struct, frozen=True, kw_only=True):
    """What to measure."""

    half: Annotated[Literal["both", "decode", "prefill"], Meta(description="which half")] = "both"
    backend: Annotated[Literal["triton", "flashinfer"], Meta(description="whose kernels")] = "triton"
    sizes: Annotated[str, Meta(description="sizes of heads, with commas between")] = "64,128"
    cases: Annotated[str, Meta(description="parts of the names of cases, with commas between; none: all")] = ""
    sweep: Annotated[bool, Meta(description="find the best tuning of the Triton kernels instead")] = False
    best: Annotated[int, Meta(ge=1, description="tunings that a sweep shows")] = 5


def main() -> int:
    """Measure and print; returns the exit code."""
    if "--help" in sys.argv[1:]:
        show("\n".join(["python bench/attention.py [key=value …]", *help_lines(Options)]))
        return 0
    try:
        options = build(Options, from_words(sys.argv[1:]))
        if not torch.cuda.is_available():
            sys.stderr.write("bench: this needs a GPU\n")
            return 1
        measure(options)
    except (TokaError, ValueError) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    return 0


@torch.inference_mode()
def measure(options: Options) -> None:
    """Print the tables."""
    bandwidth = copied()
    show(f"{torch.cuda.get_device_name()}: a large copy moves {bandwidth / 1e12:.2f} TB/s")
    wanted = [name for name in options.cases.split(",") if name]
    for size in map(int, options.sizes.split(",")):
        for half, cases in (("decode", DECODE), ("prefill", PREFILL)):
            chosen = [case for case in cases if not wanted or any(name in case.name for name in wanted)]
            if options.half in ("both", half) and chosen:
                if options.sweep:
                    sweep(half, size, chosen, options.best)
                else:
                    table(half, size, chosen, options.backend, bandwidth)


def table(half: str, size: int, cases: list[Case], backend: str, bandwidth: float) -> None:
    """One line a case."""
    show(f"\n{half}, {backend}, heads of {size}\n{'case':<24} {'µs':>9}   share or TFLOP/s   µs to plan (in a graph)")
    for case in cases:
        bed = Bed(case, size)
        tested = bed.half(backend, None)
        tested.plan(bed.batch)
        us = bed.time(tested)
        if case.sizes:
            rate = f"{4 * HEADS * size * case.pairs() / us / 1e6:>8.0f} TFLOP/s"
        else:
            rate = f"{bed.read / us * 1e6 / bandwidth:>8.0%}        "
        # Only what plans on the device can be timed as a graph.
        plan = partial(tested.plan, bed.batch)
        planned = f"{graph_us([plan] * 10):>9.1f}" if isinstance(tested, TritonDecode) else ""
        show(f"{case.name:<24} {us:>9.1f}   {rate}  {planned}")


def sweep(half: str, size: int, cases: list[Case], best: int) -> None:
    """The tunings whose times, relative to the least of each case, are least on (geometric) average. First what the
    compiler is given, then how rows are split."""
    found: Any
    if half == "prefill":
        found = rank(
            (prefill.Tuning(*each) for each in itertools.product((64, 128), (64, 128), (4, 8), (2, 3, 4))),
            size, cases, best,
        )  # fmt: skip
    else:
        now = decode.tuning(size, DTYPE)
        kernels = itertools.product((32, 64, 128), (2, 4), (3, 4, 5, 6))
        found = rank(
            (decode.Tuning(*each, now.least, now.programs, now.parts, now.merged) for each in kernels),
            size, cases, best,
        )  # fmt: skip
        splits = itertools.product((64, 128, 256), (1, 2, 4, 6), (32, 64), (2048, 4096))
        found = rank(
            (decode.Tuning(found.block, found.warps, found.stages, *each) for each in splits), size, cases, best
        )
    show(f"best: {found}")


def rank(tunings: Iterator[Any], size: int, cases: list[Case], best: int) -> Any:
    """Print the best and return the first of them."""
    tried = list(tunings)
    times: dict[Any, list[float]] = {tuned: [] for tuned in tried}
    for case in cases:
        bed = Bed(case, size)
        for tuned in tried:
            times[tuned].append(bed.attempt(tuned))
    least = [min(column) for column in zip(*times.values(), strict=True)]
    scores = {
        tuned: math.exp(statistics.fmean(math.log(us / low) for us, low in zip(row, least, strict=True)))
        for tuned, row in times.items()
        if all(map(math.isfinite, row))
    }
    order = sorted(scores, key=lambda tuned: scores[tuned])
    show(f"\n{len(scores)} of {len(tried)} tunings run, heads of {size}; µs of: {', '.join(c.name for c in cases)}")
    show("  least " + " ".join(f"{us:8.1f}" for us in least))
    for tuned in order[:best]:
        show(f"  {scores[tuned]:5.3f} " + " ".join(f"{us:8.1f}" for us in times[tuned]) + f"  {tuned}")
    return order[0]


class Bed:
    """A cache of as many layers as it takes, filled at random, and the batch of a case."""

    def __init__(self, case: Case, size: int) -> None:
        device = torch.device("cuda")
        self.case = case
        counts = [-(-length // PAGE) for length in case.lengths]
        blocks, rows = sum(counts), len(counts)
        self.read = sum(case.lengths) * 2 * KV_HEADS * size * DTYPE.itemsize
        """Bytes of keys and values that a call reads."""
        layers = min(max(2, -(-ROTATED // self.read)), MAX_LAYERS)
        self.cache = KVCache(_config(layers, size), blocks, PAGE, DTYPE, device)
        for layer in self.cache.layers:
            layer.normal_()
        shuffled = np.random.default_rng(1).permutation(blocks).astype(np.int32)
        tables = np.full((rows + 1, max(counts)), blocks, np.int32)
        for row, (count, begin) in enumerate(zip(counts, np.cumsum(counts) - counts, strict=True)):
            tables[row, :count] = shuffled[begin : begin + count]
        prefills = len(case.sizes)
        lengths = np.array(case.lengths, np.int64)
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        self.batch = Batch(
            tokens=nothing,
            positions=nothing,
            writes=nothing,
            rows=torch.arange(rows, device=device),
            tables=torch.from_numpy(tables).to(device),
            lengths=torch.from_numpy(lengths.astype(np.int32)).to(device),
            samples=nothing,
            sizes=np.array(case.sizes, np.int64),
            ends=lengths[:prefills],
            bounds=lengths[prefills:],
        )
        self.q = torch.randn(sum(case.sizes) or rows, HEADS, size, dtype=DTYPE, device=device)
        self.out = torch.empty_like(self.q)

    def half(self, backend: str, tuned: Any) -> Half:
        """A backend of the half that the case is for."""
        rows = len(self.case.lengths)
        if backend == "triton":
            if self.case.sizes:
                return TritonPrefill(self.cache, HEADS, tuned)
            return TritonDecode(self.cache, HEADS, rows, tuned)
        return FlashInferPrefill(self.cache, HEADS) if self.case.sizes else FlashInferDecode(self.cache, HEADS, rows)

    def time(self, half: Half) -> float:
        """µs a call, planned before."""
        return graph_us([self._call(half, layer) for layer in range(len(self.cache.layers))])

    def attempt(self, tuned: Any) -> float:
        """µs a call, ∞ where the GPU has not what the tuning asks for."""
        from triton.runtime.errors import OutOfResources

        try:
            half = self.half("triton", tuned)
            half.plan(self.batch)
            return self.time(half)
        except OutOfResources:
            return math.inf

    def _call(self, half: Half, layer: int) -> Callable[[], None]:
        return lambda: half.run(self.q, layer, self.out)


def graph_us(calls: list[Callable[[], None]]) -> float:
    """Median µs a call, over replays of a graph of all of them."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types for it
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        calls[0]()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        return timed(graph.replay) / len(calls)


def timed(run: Callable[[], object]) -> float:
    """Median µs on the current stream."""
    found = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(float(begin.elapsed_time(end)) * 1e3)
    return statistics.median(found)


def copied() -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.ones(2**30, dtype=torch.uint8, device="cuda")
    to: Tensor = torch.empty_like(source)
    return 2 * len(source) / timed(lambda: to.copy_(source)) * 1e6


def _config(layers: int, size: int) -> ModelConfig:
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": HEADS * size,
        "intermediate_size": 4 * HEADS * size,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": size,
        "max_position_embeddings": 2**17,
    }
    return ModelConfig.parse(Fields(Path("config.json"), llama))


def show(line: str) -> None:
    """Print."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
