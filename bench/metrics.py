"""What is made of answers. The definitions are those of vLLM's `bench serve`, so that figures can be compared:

- TTFT, time to first token: the first chunk with choices - sent.
- ITL, inter-token latency: between a chunk and the one before it, of the same choice. A chunk may be several tokens.
- TPOT, time per output token: (E2EL - TTFT) / (tokens of a choice - 1), of answers of more than one token.
- E2EL, end-to-end latency: the last chunk - sent.
- Tokens are those of `usage`. The duration is from the first request sent to the last chunk.
- Goodput: requests a second that kept to every limit.
- The peak of output tokens a second is that of the fullest whole second, a chunk's tokens being the answer's, spread
  evenly. The peak of concurrent requests is exact; vLLM counts all that touch a whole second.

Requests that failed are counted, and are in no other figure.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from bench.messages import Answer
from toka.errors import ConfigError

Floats = npt.NDArray[np.float64]

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""What is printed of each."""
LIMITS = ("ttft", "tpot", "e2el")
"""What a goodput limit may be on."""


def good(answers: Sequence[Answer]) -> list[Answer]:
    """Those that did not fail."""
    return [answer for answer in answers if answer.error is None]


def tpot(answer: Answer, n: int) -> float:
    """Seconds; 0 for answers of one token, which have none."""
    between = answer.completion_tokens / n - 1
    return (answer.last - answer.first) / between if between > 0 else 0.0


def times(answers: Sequence[Answer], n: Sequence[int]) -> dict[str, Floats]:
    """Every metric in milliseconds. `n` are the choices of each request."""
    ok = [(answer, many) for answer, many in zip(answers, n, strict=True) if answer.error is None]
    gaps = [np.frombuffer(answer.gaps) for answer, _ in ok]
    found = {
        "ttft": np.array([answer.first - answer.sent for answer, _ in ok]),
        "tpot": np.array([tpot(answer, many) for answer, many in ok if answer.completion_tokens > many]),
        "itl": np.concatenate(gaps) if gaps else np.zeros(0),
        "e2el": np.array([answer.last - answer.sent for answer, _ in ok]),
    }
    return {name: 1000 * values for name, values in found.items()}


def statistics(name: str, values: Floats, percentiles: Sequence[float]) -> dict[str, float]:
    """Under vLLM's keys, such as `mean_ttft_ms`; all zero where there is nothing."""
    values = values if len(values) else np.zeros(1)
    found = {"mean": float(values.mean()), "median": float(np.median(values)), "std": float(values.std())}
    found |= {f"p{p:g}": float(np.percentile(values, p)) for p in percentiles}
    return {f"{key}_{name}_ms": value for key, value in found.items()}


def duration(answers: Sequence[Answer]) -> float:
    """Seconds from the first request sent to the last answer's end, failed ones included; 0 for none."""
    return max(one.last for one in answers) - min(one.sent for one in answers) if answers else 0.0


def totals(answers: Sequence[Answer]) -> dict[str, float]:
    """Counts and rates. The rates are zero where nothing took any time."""
    ok = good(answers)
    seconds = duration(answers)
    per = 1 / seconds if seconds > 0 else 0.0
    prompt, made = sum(one.prompt_tokens for one in ok), sum(one.completion_tokens for one in ok)
    return {
        "duration": seconds,
        "completed": len(ok),
        "failed": len(answers) - len(ok),
        "total_input_tokens": prompt,
        "total_output_tokens": made,
        "request_throughput": len(ok) * per,
        "output_throughput": made * per,
        "total_token_throughput": (prompt + made) * per,
    }


def goodput(answers: Sequence[Answer], n: Sequence[int], limits: Mapping[str, float]) -> float:
    """Requests a second that kept to all limits, in milliseconds."""
    kept = 0
    for answer, many in zip(answers, n, strict=True):
        if answer.error is None:
            found = {
                "ttft": answer.first - answer.sent,
                "tpot": tpot(answer, many),
                "e2el": answer.last - answer.sent,
            }
            kept += all(1000 * found[name] <= limit for name, limit in limits.items())
    seconds = duration(answers)
    return kept / seconds if seconds > 0 else 0.0


def peaks(answers: Sequence[Answer]) -> dict[str, float]:
    """Output tokens of the fullest second, and requests at a time. Streamed answers of one choice."""
    ok = good(answers)
    if not ok:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    start = min(one.sent for one in ok)
    seconds = np.zeros(int(max(one.last for one in ok) - start) + 1)
    for one in ok:
        gaps = np.frombuffer(one.gaps)
        if one.chunks == len(gaps) + 1:
            at = one.first - start + np.concatenate([np.zeros(1), np.cumsum(gaps)])
        else:  # several choices: their chunks are taken as spread evenly
            at = np.linspace(one.first - start, one.last - start, max(one.chunks, 1))
        np.add.at(seconds, np.minimum(at.astype(int), len(seconds) - 1), one.completion_tokens / len(at))
    changes = sorted([(one.sent, 1) for one in ok] + [(one.last, -1) for one in ok])
    open_at_a_time = np.cumsum([change for _, change in changes])
    return {"max_output_tokens_per_s": float(seconds.max()), "max_concurrent_requests": int(open_at_a_time.max())}


def errors(answers: Sequence[Answer]) -> dict[str, int]:
    """What went wrong how often, most frequent first."""
    return dict(Counter(one.error for one in answers if one.error is not None).most_common())


def read_limits(text: str) -> dict[str, float]:
    """`ttft:200 tpot:50` in milliseconds. Raises ConfigError."""
    found: dict[str, float] = {}
    for pair in text.split():
        name, _, limit = pair.partition(":")
        if name not in LIMITS:
            raise ConfigError(
                f"goodput={pair}: expected one of {', '.join(LIMITS)}, and milliseconds, such as ttft:200"
            )
        try:
            found[name] = float(limit)
        except ValueError:
            raise ConfigError(f"goodput={pair}: {limit!r} is no number of milliseconds") from None
        if not found[name] >= 0:
            raise ConfigError(f"goodput={pair}: a limit cannot be negative")
    return found


def rule(title: str, mark: str) -> str:
    """A line of the printed block with a title in its middle."""
    return f"{title:{mark}^50}"


def line(name: str, value: float) -> str:
    """A line of the printed block: whole numbers as they are, others with two decimals."""
    return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"


def miscounted(asked: Sequence[tuple[int | None, int | None]], answers: Sequence[Answer]) -> list[str]:
    """Lines about answers whose `usage` is not what was asked: tokens of prompts and answers; None: unknown."""
    found = []
    for (prompt, made), one in zip(asked, answers, strict=True):
        if one.error is not None:
            continue
        if prompt not in (None, one.prompt_tokens):
            found.append(f"request {one.index}: {one.prompt_tokens} prompt tokens counted, {prompt} sent")
        if made not in (None, one.completion_tokens):
            found.append(f"request {one.index}: {one.completion_tokens} tokens came, {made} were asked for")
    return found
