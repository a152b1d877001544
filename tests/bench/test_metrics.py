"""The figures are what their definitions say: vLLM's, so that they can be compared."""

import numpy as np
import pytest

from bench.client import packed
from bench.clients import Health
from bench.messages import Answer
from bench.metrics import (
    duration,
    errors,
    goodput,
    line,
    miscounted,
    peaks,
    read_limits,
    rule,
    statistics,
    times,
    totals,
)
from toka.errors import ConfigError


def streamed(sent: float, *at: float, tokens: int | None = None, index: int = 0, error: str | None = None) -> Answer:
    """An answer whose chunks came at these seconds, one token each unless said otherwise."""
    return Answer(
        index=index,
        sent=sent,
        first=at[0],
        last=at[-1],
        chunks=len(at),
        gaps=packed(np.diff(at).tolist()),
        prompt_tokens=10,
        completion_tokens=len(at) if tokens is None else tokens,
        error=error,
    )


def test_times_of_a_request() -> None:
    """TTFT from sent to the first chunk, E2EL to the last, ITL between them, TPOT over the tokens after the first."""
    found = times([streamed(1.0, 1.5, 1.75, 2.5)], [1])
    assert {name: values.tolist() for name, values in found.items()} == {
        "ttft": [500.0],
        "itl": [250.0, 750.0],
        "tpot": [500.0],
        "e2el": [1500.0],
    }


def test_a_chunk_of_several_tokens() -> None:
    """TPOT counts tokens as `usage` does, ITL chunks."""
    found = times([streamed(0.0, 1.0, 2.0, tokens=5)], [1])
    assert found["tpot"].tolist() == [250.0]
    assert found["itl"].tolist() == [1000.0]


def test_one_token_has_no_time_per_token() -> None:
    """It is left out of TPOT, and in all else."""
    found = times([streamed(0.0, 1.0), streamed(0.0, 1.0, 3.0)], [1, 1])
    assert found["tpot"].tolist() == [2000.0]
    assert len(found["ttft"]) == len(found["e2el"]) == 2


def test_tokens_of_several_choices() -> None:
    """TPOT is that of a choice: its tokens, not the request's."""
    assert times([streamed(0.0, 1.0, 2.0, tokens=6)], [2])["tpot"].tolist() == [500.0]


def test_failures_are_in_no_figure() -> None:
    """They are counted, and lengthen the duration."""
    answers = [streamed(1.0, 2.0, 3.0), streamed(0.0, 5.0, error="gone"), streamed(0.0, 4.0, error="gone")]
    found = totals(answers)
    assert (found["completed"], found["failed"]) == (1, 2)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (10, 2)
    assert found["duration"] == duration(answers) == 5.0
    assert found["request_throughput"] == 0.2
    assert found["output_throughput"] == 0.4
    assert found["total_token_throughput"] == pytest.approx(2.4)
    assert len(times(answers, [1, 1, 1])["e2el"]) == 1
    assert errors(answers) == {"gone": 2}


def test_statistics_and_percentiles() -> None:
    """numpy's: linear between ranks, the population's deviation; under vLLM's keys."""
    found = statistics("ttft", np.array([1.0, 2.0, 3.0, 4.0]), (50, 99, 99.9))
    assert found == {
        "mean_ttft_ms": 2.5,
        "median_ttft_ms": 2.5,
        "std_ttft_ms": pytest.approx(1.25**0.5),
        "p50_ttft_ms": 2.5,
        "p99_ttft_ms": pytest.approx(3.97),
        "p99.9_ttft_ms": pytest.approx(3.997),
    }
    assert set(statistics("itl", np.zeros(0), (99,)).values()) == {0.0}


def test_goodput() -> None:
    """Requests that keep to every limit, a second; a limit itself is kept to."""
    answers = [streamed(0.0, 0.5, 1.0), streamed(0.0, 0.5, 2.0), streamed(0.0, 1.5, 2.0), streamed(0.0, 0.1, error="x")]
    assert goodput(answers, [1] * 4, {"ttft": 500.0}) == 2 / 2.0
    assert goodput(answers, [1] * 4, {"ttft": 500.0, "tpot": 500.0}) == 1 / 2.0
    assert goodput(answers, [1] * 4, {"e2el": 999.0}) == 0.0


def test_limits_are_read() -> None:
    """Several, in milliseconds; anything else is refused."""
    assert read_limits("ttft:200 tpot:50.5") == {"ttft": 200.0, "tpot": 50.5}
    for wrong in ("itl:5", "ttft", "ttft:x", "ttft:-1"):
        with pytest.raises(ConfigError, match="goodput="):
            read_limits(wrong)


def test_peaks() -> None:
    """Tokens of the fullest second from the first request on, and requests at a time."""
    answers = [streamed(10.0, 10.5, 11.5, 11.75), streamed(11.0, 11.25, 12.0, tokens=4), streamed(12.0, 12.5)]
    assert peaks(answers) == {"max_output_tokens_per_s": 4.0, "max_concurrent_requests": 2}
    assert peaks([]) == {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}


def test_counts_are_checked() -> None:
    """What `usage` says must be what was asked for, where that is known."""
    answers = [streamed(0.0, 1.0, 2.0, index=3), streamed(0.0, 1.0, index=4, error="gone")]
    assert miscounted([(10, 2), (1, 1)], answers) == []
    assert miscounted([(None, None), (1, 1)], answers) == []
    assert miscounted([(9, 5), (1, 1)], answers) == [
        "request 3: 10 prompt tokens counted, 9 sent",
        "request 3: 2 tokens came, 5 were asked for",
    ]


@pytest.mark.parametrize(
    ("busy", "lag", "warned"), [(0.9, 0.005, False), (0.91, 0.0, True), (0.1, 0.0051, True)], ids=["fine", "cpu", "lag"]
)
def test_a_client_that_was_the_bottleneck_says_so(busy: float, lag: float, warned: bool) -> None:
    """Its event loop late by more than 5 ms at the 99th percentile, or its CPU busy for more than 90 %."""
    warning = Health(clients=1, busy=busy, lag=lag, cpu=1.0, seconds=1.0).warning
    assert (warning is not None) == warned
    assert warning is None or "num_clients=2" in warning
    assert Health(clients=1, busy=busy, lag=lag, cpu=1.0, seconds=0.1).warning is None  # too short to tell


def test_lines_have_the_form_that_scrapers_read() -> None:
    """vLLM's, letter by letter."""
    assert line("Successful requests:", 1000) == "Successful requests:                     1000      "
    assert line("Mean TTFT (ms):", 1.234) == "Mean TTFT (ms):                          1.23      "
    assert rule(" Serving Benchmark Result ", "=") == "============ Serving Benchmark Result ============"
    assert rule("Time to First Token", "-") == "---------------Time to First Token----------------"
    assert rule("Time per Output Token (excl. 1st token)", "-") == "-----Time per Output Token (excl. 1st token)------"
