"""Streamed requests against an OpenAI server, as `vllm bench serve` sends and reports them.

    python bench/serve.py dataset_name=sharegpt-like ignore_eos=T
    python bench/serve.py --dataset-name random --request-rate 20 --goodput ttft:500 tpot:30 --save-result
    python bench/serve.py serve='model=DIR load_format=dummy' dataset_name=generated-shared-prefix

Requests arrive by a gamma process (`burstiness=1`: Poisson), or all at once, and at most `max_concurrency` are under
way. Prompts are token ids. What is printed and saved has vLLM's names; bench/metrics.py defines them.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.clients import Bar, Health
from bench.command import command, complain, facts, save, show, stamp, verdict
from bench.dataset import Ids, Request, Workload
from bench.messages import Answer
from bench.metrics import METRICS, goodput, line, peaks, read_limits, rule, statistics, times, totals
from bench.target import Count, Reached, asks, clients, reached, warmups
from toka.errors import ConfigError

Rate = Annotated[float, Meta(gt=0)]


class Options(Workload, frozen=True, kw_only=True):
    """What to send when, and what to report."""

    request_rate: Annotated[float, Meta(gt=0, description="requests a second; inf: all at once")] = math.inf
    burstiness: Annotated[
        float, Meta(gt=0, description="shape of the gaps between arrivals: 1 Poisson, below it burstier, inf: even")
    ] = 1.0
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None, Meta(description="let the rate grow, from and to what follows")
    ] = None
    ramp_up_start_rps: Annotated[Rate | None, Meta(description="requests a second at first")] = None
    ramp_up_end_rps: Annotated[Rate | None, Meta(description="requests a second at last")] = None
    max_concurrency: Annotated[Count | None, Meta(description="requests at a time; default: any number")] = None
    percentile_metrics: Annotated[str, Meta(description="which of ttft,tpot,itl,e2el to report")] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[str, Meta(description="such as 50,90,99")] = "99"
    goodput: Annotated[str, Meta(description="limits in milliseconds: ttft:MS tpot:MS e2el:MS")] = ""
    save_result: Annotated[bool, Meta(description="write a JSON file")] = False
    save_detailed: Annotated[bool, Meta(description="with the figures and texts of every request")] = False
    append_result: Annotated[bool, Meta(description="append to that file")] = False
    result_dir: Annotated[str | None, Meta(description="its folder")] = None
    result_filename: Annotated[str | None, Meta(description="its name; default: made of label, rate, model, date")] = (
        None
    )
    label: Annotated[str | None, Meta(description="a name for the run; default: the backend")] = None
    metadata: Annotated[str, Meta(description="further keys of the result: KEY=VALUE …")] = ""


def main() -> int:
    """Measure and print; returns the exit code."""
    return command(__doc__ or "", Options, run, frozenset({"goodput", "metadata", "header"}))


def run(options: Options) -> int:
    """The same for given options."""
    limits, percentiles, chosen = read_limits(options.goodput), read_percentiles(options), read_metrics(options)
    extra = read_metadata(options)
    with reached(options) as server:
        requests = options.requests(Ids.of(server.vocab_size))
        at = arrivals(options, len(requests))
        sent = asks(options, server, requests, stream=True, times=at)
        streams = min(options.max_concurrency or len(sent), len(sent))
        at_once = math.isinf(options.request_rate) and options.ramp_up_strategy is None
        text = options.save_detailed
        with clients(options, server, streams, stream=True, text=text, ahead=at_once) as crew:
            if options.num_warmups:
                crew.run(asks(options, server, warmups(options, requests), stream=True))
            with Bar(len(sent), shown=not options.disable_tqdm) as bar:
                answers, health = crew.run(sent, concurrency=options.max_concurrency, bar=bar)
    result = report(options, server, requests, answers, health) | extra
    if limits:
        result["request_goodput"] = goodput(answers, [one.n for one in requests], limits)
    show("\n".join(block(options, result, percentiles, chosen)))
    if options.save_result or options.append_result:
        path = result_path(options, server)
        save(path, result | (details(answers) if options.save_detailed else {}), options.append_result)
        complain(f"saved to {path}")
    return verdict(requests, answers, health, exact=options.ignore_eos)


def arrivals(options: Options, count: int) -> list[float]:
    """Seconds from the start at which each request is sent; all 0 for an infinite rate.

    Gaps are gamma distributed with shape `burstiness`. With a fixed rate they are scaled so that the last request comes
    at `count / rate`, as vLLM does. Raises ConfigError for a ramp without its ends.
    """
    strategy, first, last = options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps
    if strategy is not None:
        if first is None or last is None or first > last:
            raise ConfigError(
                f"ramp_up_strategy={strategy}: ramp_up_start_rps and ramp_up_end_rps are missing, or go down"
            )
        if not math.isinf(options.request_rate):
            raise ConfigError(f"ramp_up_strategy={strategy} and request_rate={options.request_rate}: leave one out")
        share = np.arange(count) / count
        rates = first + (last - first) * share if strategy == "linear" else first * (last / first) ** share
    elif first is not None or last is not None:
        raise ConfigError("ramp_up_start_rps and ramp_up_end_rps need ramp_up_strategy=linear or exponential")
    elif math.isinf(options.request_rate):
        return [0.0] * count
    else:
        rates = np.full(count, options.request_rate)
    if math.isinf(options.burstiness):
        gaps = 1 / rates
    else:
        generator = np.random.default_rng([options.seed, 1])
        gaps = generator.gamma(options.burstiness, 1 / (rates * options.burstiness))
    at = np.cumsum(gaps)
    if strategy is None:
        at *= count / options.request_rate / at[-1]
    found: list[float] = at.tolist()
    return found


def report(
    options: Options, server: Reached, requests: Sequence[Request], answers: Sequence[Answer], health: Health
) -> dict[str, object]:
    """The result under vLLM's keys."""
    rate = options.request_rate
    found: dict[str, object] = {
        "date": stamp(),
        "backend": options.backend,
        "endpoint_type": options.backend,
        "label": options.label,
        "model_id": server.model,
        "num_prompts": len(requests),
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": "inf" if math.isinf(options.burstiness) else options.burstiness,
        "max_concurrency": options.max_concurrency,
        "dataset_name": options.dataset_name,
        "synthetic": options.dataset_name != "custom",
        "seed": options.seed,
        **totals(answers),
        **peaks(answers),
    }
    measured = times(answers, [one.n for one in requests])
    for name in read_metrics(options):
        found |= statistics(name, measured[name], read_percentiles(options))
    return found | facts(server, health, answers)


def block(
    options: Options, result: dict[str, object], percentiles: Sequence[float], chosen: Sequence[str]
) -> list[str]:
    """The lines that vLLM prints."""

    def figure(key: str) -> float:
        value = result[key]
        assert isinstance(value, int | float)
        return value

    lines = [rule(" Serving Benchmark Result ", "=")]
    lines += [line("Successful requests:", figure("completed")), line("Failed requests:", figure("failed"))]
    if options.max_concurrency is not None:
        lines.append(line("Maximum request concurrency:", options.max_concurrency))
    if not math.isinf(options.request_rate):
        lines.append(line("Request rate configured (RPS):", options.request_rate))
    lines += [
        line("Benchmark duration (s):", figure("duration")),
        line("Total input tokens:", figure("total_input_tokens")),
        line("Total generated tokens:", figure("total_output_tokens")),
        line("Request throughput (req/s):", figure("request_throughput")),
    ]
    if "request_goodput" in result:
        lines.append(line("Request goodput (req/s):", figure("request_goodput")))
    lines += [
        line("Output token throughput (tok/s):", figure("output_throughput")),
        line("Peak output token throughput (tok/s):", figure("max_output_tokens_per_s")),
        line("Peak concurrent requests:", float(figure("max_concurrent_requests"))),
        line("Total token throughput (tok/s):", figure("total_token_throughput")),
    ]
    for name in chosen:
        short, title = METRICS[name]
        lines.append(rule(title, "-"))
        lines.append(line(f"Mean {short} (ms):", figure(f"mean_{name}_ms")))
        lines.append(line(f"Median {short} (ms):", figure(f"median_{name}_ms")))
        lines += [line(f"P{p:g} {short} (ms):", figure(f"p{p:g}_{name}_ms")) for p in percentiles]
    return [*lines, "=" * 50]


def details(answers: Sequence[Answer]) -> dict[str, object]:
    """The figures of every request, in seconds; what failed has an error, and zeros."""
    ok = [one.error is None for one in answers]
    return {
        "start_times": [one.sent for one in answers],
        "input_lens": [one.prompt_tokens for one in answers],
        "output_lens": [one.completion_tokens if good else 0 for one, good in zip(answers, ok, strict=True)],
        "ttfts": [one.first - one.sent if good else 0.0 for one, good in zip(answers, ok, strict=True)],
        "itls": [np.frombuffer(one.gaps).tolist() for one in answers],
        "latencies": [one.last - one.sent if good else 0.0 for one, good in zip(answers, ok, strict=True)],
        "generated_texts": [one.text or "" for one in answers],
        "errors": [one.error or "" for one in answers],
    }


def read_percentiles(options: Options) -> list[float]:
    """Numbers from 0 to 100. Raises ConfigError."""
    try:
        found = [float(word) for word in options.metric_percentiles.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= value <= 100 for value in found):
        raise ConfigError(f"metric_percentiles={options.metric_percentiles}: expected numbers from 0 to 100, as 50,99")
    return found


def read_metrics(options: Options) -> list[str]:
    """Names of metrics. Raises ConfigError."""
    found = [word for word in options.percentile_metrics.split(",") if word]
    if wrong := [word for word in found if word not in METRICS]:
        raise ConfigError(
            f"percentile_metrics={options.percentile_metrics}: {wrong[0]} is none of {', '.join(METRICS)}"
        )
    return found


def read_metadata(options: Options) -> dict[str, object]:
    """`KEY=VALUE …`. Raises ConfigError."""
    pairs = [word.partition("=") for word in options.metadata.split()]
    if wrong := [key for key, equals, _ in pairs if not equals or not key]:
        raise ConfigError(f"metadata={options.metadata}: {wrong[0]!r} is not KEY=VALUE")
    return {key: value for key, _, value in pairs}


def result_path(options: Options, server: Reached) -> Path:
    """Where the result goes: vLLM's file name."""
    name = options.result_filename
    if name is None:
        rate = "inf" if math.isinf(options.request_rate) else f"{options.request_rate:g}"
        concurrency = "" if options.max_concurrency is None else f"-concurrency{options.max_concurrency}"
        model = server.model.rpartition("/")[2]
        name = f"{options.label or options.backend}-{rate}qps{concurrency}-{model}-{stamp()}.json"
    return Path(options.result_dir or ".") / name


if __name__ == "__main__":
    sys.exit(main())
