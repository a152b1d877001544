"""Times the steps of one worker without a server: prompts filled in, then decoding, at several numbers of rows.

    python bench/step.py                                  the 1B shape on a GPU, 1 to 1,024 rows
    python bench/step.py shape=8b rows=1,16,64,256 context=1024
    python bench/step.py use_cudagraphs=F profile=T       kernels by their time
    python bench/step.py shape=tiny rows=1,4 context=64   runs on a CPU too

A row of the table: rows, their tokens in the cache when decoding begins, the least time a decoding step can take (its
bytes at `bandwidth`), the median step by the device's own events, the step by the wall clock, tokens a second by the
wall, and tokens a second while prompts were filled in. Weights are random.
"""

import itertools
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Annotated, Literal

import torch
from msgspec import Meta, Struct

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.shapes import write
from toka.errors import TokaError
from toka.options import build, from_words, help_lines
from toka.wire import Admit, Plan, Sampling, Welcome, pack
from workers import memory
from workers.batch import build as build_work
from workers.models.config import ModelConfig
from workers.outbox import CudaOutbox, HostOutbox, Pending, Sampled
from workers.start import Started, start

PAGE = 16
AHEAD = 2
"""Steps under way at once, as in a worker."""


class Options(Struct, frozen=True, kw_only=True):
    """What to measure."""

    shape: Annotated[Literal["1b", "8b", "tiny"], Meta(description="shape of the model")] = "1b"
    rows: Annotated[str, Meta(description="numbers of decoding rows, with commas between")] = "1,16,64,256,1024"
    context: Annotated[int, Meta(ge=1, description="tokens of each row when decoding begins")] = 512
    steps: Annotated[int, Meta(ge=2, description="decoding steps that are timed")] = 50
    temperature: Annotated[float, Meta(ge=0, description="of all rows; 0: greedy")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="of all rows")] = 1.0
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Meta(description="of the model")] = "auto"
    max_tokens_per_forward: Annotated[int, Meta(ge=1, description="tokens in one step")] = 8192
    attention_backend: Annotated[str, Meta(description="as the server's option")] = "auto"
    use_cudagraphs: Annotated[bool, Meta(description="as the server's option")] = True
    bandwidth: Annotated[float, Meta(gt=0, description="bytes a second that the floor counts with")] = 4.28e12
    profile: Annotated[bool, Meta(description="print the kernels of ten steps, for the last number of rows")] = False


def main() -> int:
    """Measure and print; returns the exit code."""
    if "--help" in sys.argv[1:]:
        show("\n".join(["python bench/step.py [key=value …]", *help_lines(Options)]))
        return 0
    try:
        measure(build(Options, from_words(sys.argv[1:])))
    except TokaError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    return 0


def measure(options: Options) -> None:
    """Print the table."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = options.dtype if options.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
    counts = [int(count) for count in options.rows.split(",")]
    most = max(counts)
    longest = -(-(options.context + 2 * options.steps + 32) // PAGE) * PAGE
    with tempfile.TemporaryDirectory() as folder:
        write(options.shape, Path(folder))
        config = ModelConfig.load(Path(folder))
        began = time.perf_counter()
        started = start(
            Welcome(
                epoch=0,
                rank=0,
                results="",
                plans="",
                model=folder,
                dtype=dtype,
                load_format="dummy",
                page_size=PAGE,
                max_slots=most,
                max_tokens=options.max_tokens_per_forward,
                max_model_len=longest,
                kv_tokens=most * longest,
                memory_utilization=0.9,
                max_ahead=AHEAD,
                attention=options.attention_backend,
                cuda_graphs=options.use_cudagraphs,
            ),
            device,
            lambda phase, done, total: None,
        )
    show(f"{options.shape}, {dtype}, {device}: ready after {time.perf_counter() - began:.1f} s")
    show("rows  context  floor ms  device ms  wall ms    tokens/s  prefill tokens/s")
    itemsize = torch.finfo(getattr(torch, dtype)).bits // 8
    for count in counts:
        runner = Runner(started, options, device)
        filled = runner.fill(count)
        busy, wall = runner.decode(count, options.steps)
        held = count * (options.context + options.steps / 2)
        read = memory.weight_bytes(config, itemsize) + held * memory.block_bytes(config, 1, itemsize)
        show(
            f"{count:>4}  {options.context:>7}  {read / options.bandwidth * 1e3:>8.3f}  {busy * 1e3:>9.3f}  "
            f"{wall * 1e3:>7.3f}  {count / wall:>10,.0f}  {filled:>16,.0f}"
        )
        if options.profile and count == counts[-1]:
            runner.profile()
        runner.release(count)


class Runner:
    """Sends plans to a worker's slots and step, as its loop does."""

    def __init__(self, started: Started, options: Options, device: torch.device) -> None:
        self.slots, self.step = started.slots, started.step
        self.options = options
        on_gpu = device.type == "cuda"
        self.outbox = CudaOutbox(len(self.slots.needed), AHEAD, device) if on_gpu else HostOutbox()
        self.pending: deque[Pending] = deque()
        self.results: list[Sampled] = []
        self.numbers = itertools.count()

    @torch.inference_mode()
    def send(self, **fields: object) -> None:
        """One step; waits for the one before the last."""
        plan = Plan(epoch=0, step=next(self.numbers), **fields)  # type: ignore[arg-type]  # fields of a plan
        self.slots.apply(plan)
        work = build_work(plan, self.slots)
        self.outbox.begin()
        self.pending.append(self.outbox.send(plan.step, self.step.run(work)))
        while len(self.pending) > AHEAD - 1:
            self.results.append(self.pending.popleft().result())

    def drain(self) -> list[Sampled]:
        """Wait for all of it; returns the results since the last time."""
        while self.pending:
            self.results.append(self.pending.popleft().result())
        results, self.results = self.results, []
        return results

    def fill(self, count: int) -> float:
        """Admit `count` rows and fill in their prompts; returns prompt tokens a second."""
        options = self.options
        blocks = -(-(options.context + 2 * options.steps + 32) // PAGE)
        sampling = Sampling(temperature=options.temperature, top_p=options.top_p)
        admits = [
            Admit(
                slot=slot,
                ids=pack([(slot * 7919 + at * 104729) % 256 for at in range(options.context)]),
                blocks=pack(range(slot * blocks, (slot + 1) * blocks)),
                seed=slot,
                prompt_len=options.context,
                sampling=sampling,
            )
            for slot in range(count)
        ]
        self.send(admits=admits, decode=b"")
        self.drain()
        began = time.perf_counter()
        slot = start = 0
        while slot < count:
            chunks, room = [], options.max_tokens_per_forward
            while room and slot < count:
                size = min(room, options.context - start)
                chunks += [slot, start, size]
                room, start = room - size, start + size
                if start == options.context:
                    slot, start = slot + 1, 0
            self.send(chunks=pack(chunks))
        self.drain()
        return count * options.context / (time.perf_counter() - began)

    def decode(self, count: int, steps: int) -> tuple[float, float]:
        """Seconds a step: the median by the device's events, and the mean by the wall clock."""
        self.send(decode=pack(range(count)))
        for _ in range(4):
            self.send()
        self.drain()
        began = time.perf_counter()
        for _ in range(steps):
            self.send()
        results = self.drain()
        wall = (time.perf_counter() - began) / steps
        return statistics.median(result.busy for result in results), wall

    def profile(self) -> None:
        """Print the kernels of ten steps by their time."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            for _ in range(10):
                self.send()
            self.drain()
        show(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60))

    def release(self, count: int) -> None:
        """Give the slots back."""
        self.send(decode=b"", releases=pack(range(count)))
        self.drain()


def show(text: str) -> None:
    """To standard output, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
