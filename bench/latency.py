"""How long one answer takes: streamed requests one after the other, and nothing beside them.

    python bench/latency.py input_len=128 output_len=256
    python bench/latency.py serve='model=DIR load_format=dummy' num_iters=4
    python bench/latency.py --batch-size 8 --output-json FILE

Takes the options of `vllm bench latency` and prints its lines, then milliseconds per token and to the first one
(bench/metrics.py defines them). With `batch_size` above 1 so many are sent together, and the next when all have ended.
"""

import sys
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.clients import Bar
from bench.command import command, facts, save, show, stamp, verdict
from bench.dataset import Ids, Request, random_ids
from bench.metrics import duration, good, line, statistics, times
from bench.target import Heat, Target, asks, clients, reached

PERCENTILES = (10, 25, 50, 75, 90, 99)


class Options(Target, frozen=True, kw_only=True):
    """What to send."""

    input_len: Annotated[int, Meta(ge=1, description="tokens of a prompt")] = 32
    output_len: Annotated[int, Meta(ge=1, description="tokens of an answer")] = 128
    batch_size: Annotated[int, Meta(ge=1, description="requests together (8 in vLLM)")] = 1
    num_iters_warmup: Annotated[int, Meta(ge=0, description="iterations that do not count")] = 10
    num_iters: Annotated[int, Meta(ge=1, description="iterations that count")] = 30
    seed: Annotated[int, Meta(ge=0, description="of the prompts")] = 0
    ignore_eos: Annotated[bool, Meta(description="every answer has exactly the tokens that were asked for")] = True
    temperature: Annotated[Heat | None, Meta(description="of sampling")] = 1.0
    output_json: Annotated[str | None, Meta(description="file to write the result to")] = None


def main() -> int:
    """Measure and print; returns the exit code."""
    return command(__doc__ or "", Options, run)


def run(options: Options) -> int:
    """The same for given options."""
    batch, n = options.batch_size, options.n or 1
    with reached(options) as server:
        ids = Ids.of(server.vocab_size)

        def made(iterations: int, seed: int) -> list[Request]:
            drawn = random_ids(
                iterations * batch, seed, ids, input_len=options.input_len, output_len=options.output_len
            )
            return [one._replace(n=n) for one in drawn]

        requests = made(options.num_iters, options.seed)
        with clients(options, server, batch, stream=True) as crew:
            if warm := made(options.num_iters_warmup, options.seed + 1):
                crew.run(asks(options, server, warm, stream=True), concurrency=batch, wave=True)
            with Bar(len(requests), shown=not options.disable_tqdm) as bar:
                sent = asks(options, server, requests, stream=True)
                answers, health = crew.run(sent, concurrency=batch, wave=True, bar=bar)
    waves = [answers[start : start + batch] for start in range(0, len(answers), batch)]
    latencies = [duration(wave) for wave in waves if len(good(wave)) == batch]
    if latencies:
        shares = {p: float(np.percentile(latencies, p)) for p in PERCENTILES}
        measured = times(answers, [n] * len(answers))
        figures = {
            name: value
            for key in ("ttft", "tpot", "e2el")
            for name, value in statistics(key, measured[key], (50, 99)).items()
        }
        per_token = 1000 * float(np.mean(latencies)) / options.output_len
        show(f"Avg latency: {np.mean(latencies)} seconds")
        for p, share in shares.items():
            show(f"{p}% percentile latency: {share} seconds")
        show(line("Mean latency / output length (ms):", per_token))
        show(line("Mean TPOT (ms):", figures["mean_tpot_ms"]))
        show(line("Median TPOT (ms):", figures["median_tpot_ms"]))
        show(line("Mean TTFT (ms):", figures["mean_ttft_ms"]))
        show(line("Median TTFT (ms):", figures["median_ttft_ms"]))
        if options.output_json is not None:
            result = {
                "date": stamp(),
                "model_id": server.model,
                "input_len": options.input_len,
                "output_len": options.output_len,
                "batch_size": batch,
                "avg_latency": float(np.mean(latencies)),
                "latencies": latencies,
                "percentiles": {str(p): share for p, share in shares.items()},
                "latency_per_token_ms": per_token,
                **figures,
            }
            save(Path(options.output_json), result | facts(server, health, answers))
    return verdict(requests, answers, health, exact=options.ignore_eos)


if __name__ == "__main__":
    sys.exit(main())
