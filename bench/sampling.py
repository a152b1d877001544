"""Times the sampler of a GPU: what a decoding step pays between its logits and its token ids.

    python bench/sampling.py                          bfloat16 logits of 128,256 tokens, 1 to 1,024 rows
    python bench/sampling.py rows=256 vocab=49152

A row of the table: the way to choose, and microseconds for each number of rows, the median of replays of a recorded
graph. `flat` logits are normal variates, `peaked` ones four times that, so that a few dozen tokens hold most of the
mass. `argmax` is torch's own, and `read` how long reading the logits takes at `bandwidth`. Few rows stay in the cache.
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from msgspec import Meta, Struct
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from toka.errors import TokaError
from toka.options import build, from_words, help_lines
from workers.sampling import SamplerState

if TYPE_CHECKING:
    from workers.kernels.sample import Sampler

CALLS = 10
"""Calls in one graph."""
WAYS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
}
FILTERS = {"top_p", "top_k", "min_p"}


class Options(Struct, frozen=True, kw_only=True):
    """What to measure."""

    rows: Annotated[str, Meta(description="numbers of rows, with commas between")] = "1,64,256,1024"
    vocab: Annotated[int, Meta(ge=2, description="logits a row")] = 128_256
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], Meta(description="of the logits")] = "bfloat16"
    bandwidth: Annotated[float, Meta(gt=0, description="bytes a second that `read` counts with")] = 4.28e12


def main() -> int:
    """Measure and print; returns the exit code."""
    if "--help" in sys.argv[1:]:
        show("\n".join(["python bench/sampling.py [key=value …]", *help_lines(Options)]))
        return 0
    try:
        options = build(Options, from_words(sys.argv[1:]))
    except TokaError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2
    if not torch.cuda.is_available():
        sys.stderr.write("bench: this needs a CUDA device\n")
        return 1
    measure(options, torch.device("cuda", 0))
    return 0


@torch.inference_mode()
def measure(options: Options, device: torch.device) -> None:
    """Print the table."""
    from workers.kernels.sample import Sampler

    counts = [int(count) for count in options.rows.split(",")]
    dtype: torch.dtype = getattr(torch, options.dtype)
    sampler = Sampler(max(counts), options.vocab, device)
    line("µs", [f"{count:,} rows" for count in counts])
    read = options.vocab * dtype.itemsize / options.bandwidth * 1e6
    line("read", [f"{count * read:.1f}" for count in counts])
    for kind, spread in (("flat", 1.0), ("peaked", 4.0)):
        generator = torch.Generator(device).manual_seed(0)
        shape = (max(counts), options.vocab)
        logits = (torch.randn(shape, device=device, generator=generator) * spread).to(dtype)
        line(f"{kind}, argmax", [f"{timed(partial(torch.argmax, logits[:count], -1)):.1f}" for count in counts])
        for name, fields in WAYS.items():
            times = [timed(call(sampler, logits[:count], fields)) for count in counts]
            line(f"{kind}, {name}", [f"{time:.1f}" for time in times])


def call(sampler: "Sampler", logits: Tensor, fields: dict[str, float]) -> Callable[[], object]:
    """Sample every row by the same parameters, each with its own seed."""
    count, device = len(logits), logits.device
    state = SamplerState(
        temperature=torch.full((count,), fields.get("temperature", 1.0), device=device),
        top_k=torch.full((count,), int(fields.get("top_k", 0)), dtype=torch.int32, device=device),
        top_p=torch.full((count,), fields.get("top_p", 1.0), device=device),
        min_p=torch.full((count,), fields.get("min_p", 0.0), device=device),
        seed=torch.arange(count, device=device),
        choice=torch.zeros(count, dtype=torch.int64, device=device),
        stops=torch.full((count, 9), -1, device=device),
        dead=torch.zeros(count, dtype=torch.bool, device=device),
        last=torch.zeros(count, dtype=torch.int64, device=device),
    )
    rows = torch.arange(count, device=device)
    ids = torch.empty(count, dtype=torch.int32, device=device)
    full = bool(FILTERS & fields.keys())
    return lambda: sampler(logits, rows, rows, state, ids, full=full)


def timed(function: Callable[[], object]) -> float:
    """Microseconds of a call, by the median of 20 replays of a graph of CALLS calls."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            function()
    times = []
    for _ in range(20):
        # Torch gives events no types.
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(float(began.elapsed_time(ended)) / CALLS * 1e3)
    return statistics.median(times)


def line(name: str, cells: list[str]) -> None:
    """A row of the table."""
    show(f"{name:<28}" + "".join(f"{cell:>12}" for cell in cells))


def show(text: str) -> None:
    """Print at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
