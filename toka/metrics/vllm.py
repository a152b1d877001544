"""What vLLM calls the same values, so that dashboards, autoscalers and gateways made for it work as they are.

That is what its Grafana board and those who scale and route by it read, under today's names and two older ones. Labels
are vLLM's: `model_name` and `engine`, and `finished_reason` or `reason` where there is one.
"""

from collections.abc import Callable, Iterable

from toka.metrics.catalogue import CATALOGUE, Metric, Row
from toka.metrics.histogram import Histogram
from toka.metrics.record import Metrics

PREFIX = "vllm:"
OTHERWISE = {
    "kv_cache_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "step_tokens": ("iteration_tokens_total",),
}
"""Names that differ by more than the prefix, or of which there are two."""
ALIKE = frozenset(
    {
        *("num_requests_running", "num_requests_waiting", "num_preemptions_total", "admission_rejections_total"),
        *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
        *("request_success_total", "time_to_first_token_seconds", "request_time_per_output_token_seconds"),
        *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens"),
        *("request_generation_tokens", "request_max_num_generation_tokens", "request_params_n"),
        "request_params_max_tokens",
    }
)
SUMMED = frozenset({"toka_num_requests_waiting", "toka_prompt_tokens_total"})
"""Those whose own label vLLM does not have: its value is the sum."""


def names(metric: Metric) -> list[str]:
    """What vLLM calls one of toka's metrics; nothing where it has none like it."""
    name = metric.name.removeprefix("toka_")
    return [PREFIX + other for other in OTHERWISE.get(name, (name,) if name in ALIKE else ())]


def aliases() -> list[Metric]:
    """All of them, as metrics of their own."""
    found = []
    for metric in CATALOGUE:
        shown = metric._replace(help=f"vLLM's name of {metric.name}.")
        if metric.name in SUMMED:
            shown = shown._replace(read=summed(metric.read), labels=())
        found += [shown._replace(name=name) for name in names(metric)]
    return [*found, CACHE_INFO]


def summed(read: Callable[[Metrics], Iterable[Row]]) -> Callable[[Metrics], Iterable[Row]]:
    """One value, for all labels."""

    def total(metrics: Metrics) -> list[Row]:
        return [((), sum(value for _, value in read(metrics) if not isinstance(value, Histogram)))]

    return total


def cache(metrics: Metrics) -> list[Row]:
    """The values of CACHE_INFO's labels."""
    config = metrics.config
    return [((str(config.page_size), str(metrics.state().blocks), str(config.gpu_memory_utilization), "True"), 1)]


CACHE_INFO = Metric(
    "vllm:cache_config_info",
    "info",
    "vLLM's description of the KV cache.",
    cache,
    ("block_size", "num_gpu_blocks", "gpu_memory_utilization", "enable_prefix_caching"),
)
