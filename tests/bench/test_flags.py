"""Options can be written as for vLLM's benchmarks, and what is not carried is refused with what to do instead."""

import math

import pytest

from bench import latency, serve, throughput
from bench.flags import REFUSED, parse
from toka.errors import ConfigError
from toka.options import options

SEVERAL = frozenset({"goodput", "metadata", "header"})


def read(*words: str) -> serve.Options:
    return parse(serve.Options, words, SEVERAL)


def test_both_ways_of_writing() -> None:
    """vLLM's and toka's, mixed."""
    made = read("--dataset-name", "random", "--num-prompts=5", "request_rate=2.5", "--ignore-eos", "--seed", "3")
    assert (made.dataset_name, made.num_prompts, made.request_rate, made.ignore_eos, made.seed) == (
        *("random", 5, 2.5),
        *(True, 3),
    )


def test_switches_stand_alone_or_have_a_value() -> None:
    """Before another option, at the end, or with T or F."""
    assert read("--save-result", "--ignore-eos").ignore_eos
    assert read("--ignore-eos", "seed=1").ignore_eos
    assert not read("--ignore-eos", "F", "--seed", "1").ignore_eos
    assert not read("ignore_eos=F").ignore_eos
    assert not parse(throughput.Options, ["ignore_eos=F"]).ignore_eos


def test_several_values() -> None:
    """All words up to the next option belong together."""
    made = read("--goodput", "ttft:200", "tpot:50", "--metadata", "a=1", "b=2", "seed=4")
    assert (made.goodput, made.metadata, made.seed) == ("ttft:200 tpot:50", "a=1 b=2", 4)
    assert read("goodput=ttft:1", "e2el:2").goodput == "ttft:1 e2el:2"


def test_infinity_is_a_number() -> None:
    """The rate's default can be written."""
    assert read("--request-rate", "inf").request_rate == math.inf == read().request_rate
    assert read("burstiness=inf").burstiness == math.inf


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--tokenizer", "x"], "token ids"),
        (["--profile"], "profiler"),
        (["--trust-remote-code", "--seed", "1"], "token ids"),
        (["--dataset-name", "sharegpt"], "sharegpt-like"),
        (["--backend", "sglang"], "openai speaks"),
        (["--num-prompt", "1"], "did you mean num_prompts"),
        (["--num-prompts", "0"], "at least 1"),
        (["--dataset-name", "randon"], "Did you mean random"),
    ],
)
def test_what_is_refused(words: list[str], reason: str) -> None:
    """In one line that says what to do."""
    with pytest.raises(ConfigError, match=reason) as caught:
        read(*words)
    assert "\n" not in str(caught.value)


def test_defaults_are_those_of_vllm() -> None:
    """Those of `bench serve`; everything random is sampled at 1.0 and to its full length where nothing is streamed."""
    made = read()
    assert (made.backend, made.dataset_name, made.request_rate, made.burstiness) == ("openai", "random", math.inf, 1.0)
    assert (made.random_input_len, made.random_output_len, made.random_range_ratio) == (1024, 128, 0.0)
    assert (made.metric_percentiles, made.percentile_metrics) == ("99", "ttft,tpot,itl,e2el")
    assert (made.ignore_eos, made.temperature, made.num_warmups, made.seed) == (False, None, 0, 0)
    whole, single = parse(throughput.Options, []), parse(latency.Options, [])
    assert whole.ignore_eos
    assert single.ignore_eos
    assert (whole.temperature, single.temperature) == (1.0, 1.0)
    assert (single.input_len, single.output_len, single.num_iters, single.num_iters_warmup) == (32, 128, 30, 10)


def test_nothing_is_both_carried_and_refused() -> None:
    """An option that comes leaves the list of those that are not there."""
    for struct in (serve.Options, throughput.Options, latency.Options):
        assert not options(struct).keys() & REFUSED.keys()
        assert all(option.description for option in options(struct).values())


def test_arrivals() -> None:
    """All at once; by a gamma process that ends at count / rate; evenly; and faster and faster."""
    assert serve.arrivals(read(), 3) == [0.0] * 3
    poisson = serve.arrivals(read("request_rate=10"), 1000)
    assert poisson == sorted(poisson)
    assert poisson[-1] == pytest.approx(100.0)
    assert (
        poisson
        == serve.arrivals(read("request_rate=10"), 1000)
        != serve.arrivals(read("request_rate=10", "seed=1"), 1000)
    )
    assert serve.arrivals(read("request_rate=10", "burstiness=inf"), 3) == pytest.approx([0.1, 0.2, 0.3])
    ramp = ["ramp_up_strategy=linear", "ramp_up_start_rps=1", "ramp_up_end_rps=100", "burstiness=inf"]
    late, early = serve.arrivals(read(*ramp), 100)[-1], serve.arrivals(read(*ramp), 100)[0]
    assert early == 1.0
    assert late < 10
    with pytest.raises(ConfigError, match="ramp_up_start_rps"):
        serve.arrivals(read("ramp_up_strategy=linear"), 3)
    with pytest.raises(ConfigError, match="need ramp_up_strategy"):
        serve.arrivals(read("ramp_up_start_rps=1"), 3)


def test_lists_of_names_and_numbers() -> None:
    """Percentiles and metrics are read, and refused where they are none."""
    assert serve.read_percentiles(read("metric_percentiles=50,99.9")) == [50.0, 99.9]
    assert serve.read_metrics(read("percentile_metrics=ttft,itl")) == ["ttft", "itl"]
    assert serve.read_metadata(read("--metadata", "a=1", "b=x=y")) == {"a": "1", "b": "x=y"}
    for option in ("metric_percentiles=200", "metric_percentiles=x"):
        with pytest.raises(ConfigError, match="metric_percentiles"):
            serve.read_percentiles(read(option))
    with pytest.raises(ConfigError, match="tft is none of"):
        serve.read_metrics(read("percentile_metrics=tft"))
    with pytest.raises(ConfigError, match="metadata=x"):
        serve.read_metadata(read("metadata=x"))
