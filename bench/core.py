"""What the engine itself costs, without a model: the scheduler's step, the plan's bytes, and CPU per token.

    python bench/core.py             everything, under a minute
    python bench/core.py --smoke     the same path with little work: that it runs, not how fast

Scheduling: plan + apply for so many running sequences that share the first 900 tokens of their prompts, with Hydragen
groups on: median and 95th percentile of the CPU time, for which it does not matter what else the machine does. First
with nobody coming or going, then (`turnover`) with answers of 200 tokens on average, where each one that ends makes
room for another. A pretend device answers outside the timing.

CPU per token: a real server, a pretend worker and a client are three processes. What counts is the CPU time of the
server's process from the first request to the last answer, over the tokens generated: whole answers (64 requests of
n=64, 256 tokens, steps that take no time), and streams (256 clients, steps of 4 ms). The last line is JSON.
"""

import json
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.pretend import serving
from bench.server import Server, ServerEnded
from toka.core.hydragen import Groups
from toka.core.limits import Limits
from toka.core.prompt import Prompt
from toka.core.scheduler import Scheduler
from toka.core.sequence import Sequence
from toka.sim.device import NO_END, STOP_ID, Device
from toka.wire import Plan, Tokens, encode

SHARED = 900
"""Tokens that all prompts begin with."""
TAIL = 60
"""Tokens of a prompt after these, on average."""
MEAN_OUTPUT = 200
BUSY = 0.010
"""Seconds that a step is said to take."""
TICKS = os.sysconf("SC_CLK_TCK")


class Timing(NamedTuple):
    """Milliseconds of the steps, and the plans' sizes."""

    median: float
    p95: float
    plan: float
    """Of the median step, the plan's part."""
    plan_bytes: float
    """Median."""
    encode_us: float
    """Median."""

    def __str__(self) -> str:
        return (
            f"median {self.median:.3f} ms, p95 {self.p95:.3f} ms, plan {self.plan:.3f} ms; "
            f"{self.plan_bytes:,.0f} bytes encoded in {self.encode_us:.1f} µs"
        )


def main() -> int:
    """Measure and print; returns the exit code."""
    words = sys.argv[1:]
    if "--help" in words or set(words) - {"--smoke"}:
        show(__doc__ or "")
        return 0 if "--help" in words else 2
    smoke = "--smoke" in words
    try:
        show(json.dumps(measure(smoke)))
    except (ServerEnded, OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    return 0


def measure(smoke: bool) -> dict[str, object]:
    """All figures."""
    figures: dict[str, object] = {"bench": "core", "smoke": smoke}
    for running in (1024, 4096):
        steps = 40 if smoke else 400
        steady = schedule(running, steps, turnover=False)
        show(f"{running} running: {steady}")
        figures |= {f"step_ms_{running}": steady.median, f"step_ms_{running}_p95": steady.p95}
        if running == 1024:
            figures |= {"plan_bytes_1024": steady.plan_bytes, "plan_encode_us_1024": steady.encode_us}
        moving = schedule(running, steps, turnover=True)
        show(f"{running} running, {running / MEAN_OUTPUT:.0f} ending and starting a step: {moving}")
        figures |= {f"step_ms_{running}_turnover": moving.median, f"step_ms_{running}_turnover_p95": moving.p95}
    whole, _ = through_http(0.0, requests=16 if smoke else 64, n=16 if smoke else 64, tokens=256, stream=False)
    show(f"whole answers: {whole:.2f} µs of CPU a token")
    stream, tokens_per_chunk = through_http(4.0, requests=256, n=1, tokens=64 if smoke else 1024, stream=True)
    show(f"streaming: {stream:.2f} µs of CPU a token, {tokens_per_chunk:.3f} tokens a chunk")
    figures |= {
        "cpu_us_per_token": whole,
        "cpu_us_per_token_stream": stream,
        "tokens_per_chunk": tokens_per_chunk,
    }
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def schedule(running: int, steps: int, turnover: bool) -> Timing:
    """Time `steps` steps of a full batch."""
    generator = np.random.default_rng(0)
    shared = generator.integers(1000, 100_000, SHARED, dtype=np.int32)
    horizon = 2 * MEAN_OUTPUT if turnover else steps + 400
    many = running + (steps * running // MEAN_OUTPUT + 2 * running if turnover else 0)
    ends = np.full(many, NO_END, dtype=np.int64)
    if turnover:
        ends = generator.integers(1, 2 * MEAN_OUTPUT, many)
    page = 16
    device = Device(running, page, ends, np.zeros(many, dtype=np.int64))
    scheduler = Scheduler(
        Limits(
            num_blocks=running * (2 * TAIL + horizon + page) // page + SHARED,
            page_size=page,
            max_seqs=running,
            max_tokens=8192,
            max_ahead=16,
            max_len=SHARED + 2 * TAIL + horizon,
        ),
        groups=Groups(256 // page, 32),
    )
    fresh = iter(range(many))

    def submit() -> None:
        tail = generator.integers(1000, 100_000, generator.integers(1, 2 * TAIL), dtype=np.int32)
        prompt = Prompt(np.concatenate([shared, tail]))
        scheduler.submit(Sequence(prompt, limit=horizon, stops=(STOP_ID,), seed=next(fresh)))

    for _ in range(running):
        submit()
    sent: deque[Tokens] = deque()
    samples: list[tuple[float, float, Plan]] = []
    begun = 0  # steps since the batch is full; the first are not counted
    while len(samples) < steps:
        started = time.thread_time()
        plan = scheduler.plan()
        planned = time.thread_time() - started
        if plan is not None:
            sent.append(Tokens(epoch=0, step=plan.step, ids=device.run(plan).ids, busy=BUSY))
            if len(sent) < 2:
                continue
        started = time.thread_time()
        progress = scheduler.apply(sent.popleft())
        applied = time.thread_time() - started
        if turnover:
            for _ in progress.ended:
                submit()
        full = plan is not None and (turnover or not plan.chunks) and scheduler.running >= running * 0.98
        begun = begun + 1 if full else begun
        if plan is not None and begun > 20:
            samples.append((planned, applied, plan))
    planning = np.array([sample[0] for sample in samples])
    whole = planning + np.array([sample[1] for sample in samples])
    encoding, sizes = [], []
    for _, _, plan in samples:
        started = time.thread_time()
        data = encode(plan)
        encoding.append(time.thread_time() - started)
        sizes.append(len(data))
    return Timing(
        median=1000 * float(np.median(whole)),
        p95=1000 * float(np.percentile(whole, 95)),
        plan=1000 * float(np.median(planning)),
        plan_bytes=float(np.median(sizes)),
        encode_us=1e6 * float(np.median(encoding)),
    )


def through_http(step_ms: float, *, requests: int, n: int, tokens: int, stream: bool) -> tuple[float, float]:
    """Microseconds of the server's CPU per generated token, and tokens per chunk (0 without streaming)."""
    with serving(step_ms) as server:
        load(server, requests=8, n=1, tokens=8, stream=stream)  # whatever is done once
        before = cpu_seconds(server.process.pid)
        done = load(server, requests=requests, n=n, tokens=tokens, stream=stream)
        seconds = cpu_seconds(server.process.pid) - before
    made, wall = int(done["tokens"]), float(done["seconds"])
    assert made == requests * n * tokens, f"{made} tokens came, {requests * n * tokens} were asked for"
    show(f"{made:,} tokens in {wall:.1f} s, {made / wall:,.0f} a second, server's CPU {seconds:.2f} s")
    return 1e6 * seconds / made, made / done["chunks"] if stream else 0.0


def load(server: Server, *, requests: int, n: int, tokens: int, stream: bool) -> dict[str, float]:
    """Run the client; what it counted."""
    command = [sys.executable, str(Path(__file__).parent / "load.py"), server.url, server.model]
    words = [str(requests), str(n), str(tokens), "stream" if stream else "whole"]
    done = subprocess.run([*command, *words], stdout=subprocess.PIPE, check=True, timeout=120)
    counted: dict[str, float] = json.loads(done.stdout)
    return counted


def cpu_seconds(pid: int) -> float:
    """CPU that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def show(line: str) -> None:
    """Print."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
