"""The page that Prometheus reads: its form, its names, and the document that lists them."""

import re
from pathlib import Path

import pytest
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from toka.config import Config
from toka.metrics.catalogue import CATALOGUE
from toka.metrics.histogram import Histogram
from toka.metrics.page import Page
from toka.metrics.record import Metrics, State
from toka.metrics.vllm import aliases, names

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
MODEL = 'a "model"\\of\nmine'
PYTHON = re.compile(r"process_|python_gc_")
VLLM_BOARD = {
    *("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds"),
    *("time_per_output_token_seconds", "request_prompt_tokens", "request_generation_tokens"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_max_num_generation_tokens", "prompt_tokens", "generation_tokens", "request_success"),
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"),
    *("cache_config", "prefix_cache_queries", "prefix_cache_hits"),
}
"""Families that vLLM's Grafana board, autoscalers and routers read."""


def metrics(**options: object) -> Metrics:
    """Every labelled metric has some value."""
    made = Metrics(Config(**options), MODEL)  # type: ignore[arg-type]
    made.state = lambda: State(3, 5, 2, 10, 20, 30, 1, True)
    made.answered("/v1/completions", "200", None)
    made.answered("/v1/completions", "429", "rate_limit_exceeded")
    made.startup["weights"] = 1.5
    made.step_duration["mixed"].observe(0.02, 3)
    return made


def families(page: Page) -> dict[str, Family]:
    return {family.name: family for family in text_string_to_metric_families(page.take().render().decode())}


def test_the_page_can_be_read() -> None:
    """Prometheus' own parser finds every family with its type and help, and labels as they were."""
    served = families(Page(metrics()))
    for metric in [*CATALOGUE, *aliases()]:
        found = served[metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name]
        assert found.type == ("gauge" if metric.kind == "info" else metric.kind)
        assert found.documentation == metric.help
        assert {name for sample in found.samples for name in sample.labels} - {"le"} == set(metric.all_labels)
        assert {sample.labels.get("model_name", MODEL) for sample in found.samples} == {MODEL}
    assert any(name.startswith("process_") for name in served)
    assert any(name.startswith("python_gc_") for name in served)


def test_a_snapshot_does_not_change() -> None:
    """What is written down in another thread is what was there when somebody asked."""
    made = metrics()
    snapshot = Page(made).take()
    made.step_gap.observe(0.5)
    made.tokenizing = 7
    text = snapshot.render().decode()
    assert re.search(r"^toka_tokenize_queue 0.0$", text, re.MULTILINE)
    assert re.search(r"^toka_step_gap_seconds_count\{.*\} 0.0$", text, re.MULTILINE)


def test_the_rules_for_names_are_kept() -> None:
    """What `promtool check metrics` complains of: counters end in _total and nothing else does, base units only, no
    abbreviations, no type in a name, no colon, help for all."""
    for metric in CATALOGUE:
        assert re.fullmatch(r"toka_[a-z0-9]+(_[a-z0-9]+)*", metric.name)
        assert metric.help
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert (metric.kind == "info") == metric.name.endswith("_info")
        words = set(metric.name.split("_"))
        assert not words & {"counter", "gauge", "histogram", "metric", "bucket", "sum", "count"}
        assert not words & {"ms", "milliseconds", "microseconds", "us", "minutes", "hours", "kb", "mb", "percent"}
        assert not set(metric.all_labels) & {"le", "quantile", "job", "instance"}
        assert all(re.fullmatch(r"[a-z_]+", label) for label in metric.all_labels)
    served = [metric.name for metric in [*CATALOGUE, *aliases()]]
    assert len(served) == len(set(served))


def test_histograms_add_up() -> None:
    """Borders rise, counts are cumulative, the last is all of them."""
    for family in families(Page(metrics())).values():
        if family.type != "histogram":
            continue
        series: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
        totals = {}
        for sample in family.samples:
            labels = frozenset(item for item in sample.labels.items() if item[0] != "le")
            if sample.name.endswith("_bucket"):
                series.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
            if sample.name.endswith("_count"):
                totals[labels] = sample.value
        assert set(series) == set(totals)
        for labels, found in series.items():
            assert found == sorted(found)
            assert found[-1] == (float("inf"), totals[labels])


def test_a_value_counts_so_many_times() -> None:
    """One observation with a weight is as many without, and one on a border counts below it."""
    weighted, single = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    weighted.observe(1.0, 3)
    weighted.observe(2.5, 2)
    for value in (1.0, 1.0, 1.0, 2.5, 2.5):
        single.observe(value)
    assert weighted.counts == single.counts == [3, 0, 2]
    assert weighted.sum == single.sum == 8.0


def test_the_document_is_the_catalogue() -> None:
    """Every metric with its kind, labels and meaning, in order, and nothing else; and vLLM's names."""
    shown = re.findall(r"^\| `(toka_\w+)` \| (\w+) \| (.+?) \| (.+) \|$", DOCUMENT, re.MULTILINE)
    assert shown == [
        (
            metric.name,
            metric.kind,
            ", ".join(f"`{label}`" for label in metric.all_labels) or "–",
            metric.help,
        )
        for metric in CATALOGUE
    ]
    renamed = re.findall(r"^\| `(vllm:\w+)` \| (?:`(toka_\w+)`)?", DOCUMENT, re.MULTILINE)
    assert renamed == [
        *((alias, metric.name) for metric in CATALOGUE for alias in names(metric)),
        ("vllm:cache_config_info", ""),
    ]


@pytest.mark.parametrize("compat", ["vllm", "none"])
def test_what_is_served_is_what_is_documented(compat: str) -> None:
    """Every family on the page is in the document, and every name in the document's tables is on the page."""
    served = families(Page(metrics(metrics_compat=compat)))
    documented = re.findall(r"^\| `((?:toka_|vllm:)\w+)` \|", DOCUMENT, re.MULTILINE)
    if compat == "none":
        documented = [name for name in documented if name.startswith("toka_")]
    counters = {metric.name for metric in [*CATALOGUE, *aliases()] if metric.kind == "counter"}
    assert {name for name in served if not PYTHON.match(name)} == {
        name.removesuffix("_total") if name in counters else name for name in documented
    }


def test_vllms_board_finds_what_it_reads() -> None:
    """All that its Grafana board, KEDA and gateways ask for is there, labelled as it labels it, with the own value."""
    served = families(Page(metrics()))
    for name in VLLM_BOARD:
        found = served.get(f"vllm:{name}") or served[f"vllm:{name}_info"]
        for sample in found.samples:
            if not found.name.endswith("config_info"):
                assert set(sample.labels) - {"le", "finished_reason"} == {"model_name", "engine"}
    [waiting] = served["vllm:num_requests_waiting"].samples
    assert waiting.value == 5
    [usage] = served["vllm:kv_cache_usage_perc"].samples
    assert usage.value == pytest.approx(1 / 6)
    [cache] = served["vllm:cache_config_info"].samples
    assert cache.labels["block_size"] == "16"
    assert cache.labels["num_gpu_blocks"] == "60"


def test_no_secret_is_an_option_that_is_shown() -> None:
    """The options on the page are few, and none is a key or a place on the machine."""
    text = Page(metrics(api_key="sk-secret", api_key_file="/etc/keys", model="/home/me/model")).take().render()
    assert b"secret" not in text
    assert b"/etc/keys" not in text
    assert b"/home/me" not in text


def test_nothing_is_global() -> None:
    """Two engines in one process count apart, and the library's own registry stays as it was."""
    from prometheus_client import REGISTRY

    before = {family.name for family in REGISTRY.collect()}
    one, other = metrics(), metrics()
    Page(one)
    Page(other)
    one.answered("/health", "200", None)
    assert other.requests["/health", "200"] == 0
    assert {family.name for family in REGISTRY.collect()} == before
