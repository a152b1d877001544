"""All metrics by name: what they mean, their labels, and where their values come from.

docs/metrics.md is this list; a test compares them. Labels `model_name` and `engine` (the replica, counted from 0) stand
before the others wherever `replica` is set.
"""

import platform
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from toka.metrics.histogram import Histogram
from toka.metrics.record import Metrics
from toka.options import shown_value
from toka.version import VERSION

Kind = Literal["counter", "gauge", "histogram", "info"]
Row = tuple[tuple[str, ...], float | Histogram]
"""Values of the labels, and the value."""
ENGINE = "0"
RANK = "0"
SHOWN = (
    *("dtype", "load_format", "page_size", "max_seqs_per_forward", "max_tokens_per_forward", "gpu_memory_utilization"),
    *("use_cudagraphs", "use_hydragen", "attention_backend", "use_spec_allocation", "look_ahead"),
)
"""Options in `toka_config_info`: none that is a secret or tells of the machine."""


class Metric(NamedTuple):
    """One name. A counter's ends in `_total`, an info's in `_info`."""

    name: str
    kind: Kind
    help: str
    read: Callable[[Metrics], Iterable[Row]]
    labels: tuple[str, ...] = ()
    replica: bool = True

    @property
    def all_labels(self) -> tuple[str, ...]:
        """In order."""
        return ("model_name", "engine", *self.labels) if self.replica else self.labels

    def rows(self, metrics: Metrics) -> list[Row]:
        """Every value, with all labels."""
        head = (metrics.model_name, ENGINE) if self.replica else ()
        return [((*head, *labels), value) for labels, value in self.read(metrics)]


def one(read: Callable[[Metrics], float | Histogram]) -> Callable[[Metrics], Iterable[Row]]:
    """A single value without labels of its own."""
    return lambda metrics: [((), read(metrics))]


def config_labels(metrics: Metrics) -> dict[str, str]:
    """What `toka_config_info` says."""
    return {name: shown_value(getattr(metrics.config, name)) for name in SHOWN}


CATALOGUE: tuple[Metric, ...] = (
    Metric("toka_num_requests_running", "gauge", "Sequences that have a slot.", one(lambda m: m.state().running)),
    Metric(
        "toka_num_requests_waiting",
        "gauge",
        "Sequences in the queue, by lane: those that somebody waits for, and work in the background.",
        lambda m: [(("online",), m.state().waiting - m.state().waiting_batch), (("batch",), m.state().waiting_batch)],
        ("lane",),
    ),
    Metric(
        "toka_kv_cache_usage_ratio",
        "gauge",
        "Share of the KV cache that sequences own, 0 to 1.",
        one(lambda m: m.state().usage),
    ),
    Metric(
        "toka_kv_cache_blocks",
        "gauge",
        "Blocks of KV cache: used by sequences, cached for their content, or free.",
        lambda m: [
            (("used",), m.state().blocks_used),
            (("cached",), m.state().blocks_cached),
            (("free",), m.state().blocks_free),
        ],
        ("state",),
    ),
    Metric(
        "toka_prompt_tokens_total",
        "counter",
        "Tokens of prompts, once for each sequence: computed, or found in the prefix cache.",
        lambda m: [(("computed",), m.counts.computed), (("cached",), m.counts.cached)],
        ("source",),
    ),
    Metric(
        "toka_generation_tokens_total",
        "counter",
        "Tokens that came back for sequences that had not ended.",
        one(lambda m: m.counts.generated),
    ),
    Metric(
        "toka_prefix_cache_queries_total",
        "counter",
        "Tokens of prompts looked up in the prefix cache, when a sequence first starts.",
        one(lambda m: m.counts.queries),
    ),
    Metric(
        "toka_prefix_cache_hits_total", "counter", "Of these, tokens that were found.", one(lambda m: m.counts.hits)
    ),
    Metric(
        "toka_recomputed_tokens_total",
        "counter",
        "Tokens that were run again after a preemption.",
        one(lambda m: m.counts.recomputed),
    ),
    Metric(
        "toka_num_preemptions_total",
        "counter",
        "Times that a sequence lost its slot to others.",
        one(lambda m: m.counts.preemptions),
    ),
    Metric(
        "toka_hydragen_groups",
        "gauge",
        "Groups of sequences whose shared prefix is read once for all of them.",
        one(lambda m: m.state().groups),
    ),
    Metric(
        "toka_hydragen_shared_tokens_total",
        "counter",
        "Cached tokens that steps did not read again for a sequence because they had for another of its group.",
        one(lambda m: m.counts.shared),
    ),
    Metric(
        "toka_request_success_total",
        "counter",
        "Sequences that are over: stop, length, abort (the client hung up, or its deadline passed), error.",
        lambda m: [((reason,), count) for reason, count in m.finished.items()],
        ("finished_reason",),
    ),
    Metric(
        "toka_requests_total",
        "counter",
        "HTTP requests by route and status; 499: the client hung up before an answer began.",
        lambda m: m.requests.items(),
        ("endpoint", "status"),
        replica=False,
    ),
    Metric(
        "toka_admission_rejections_total",
        "counter",
        "HTTP requests that were not let in, by the code of their error.",
        lambda m: [((reason,), count) for reason, count in m.rejections.items()],
        ("reason",),
    ),
    Metric(
        "toka_time_to_first_token_seconds",
        "histogram",
        "From the engine's taking a sequence to its first token.",
        one(lambda m: m.first_token),
    ),
    Metric(
        "toka_inter_token_latency_seconds",
        "histogram",
        "Between a sequence's token and the one before it.",
        one(lambda m: m.inter_token),
    ),
    Metric(
        "toka_request_time_per_output_token_seconds",
        "histogram",
        "A sequence's mean time between tokens.",
        one(lambda m: m.per_token),
    ),
    Metric(
        "toka_e2e_request_latency_seconds",
        "histogram",
        "From the engine's taking a sequence to its end.",
        one(lambda m: m.e2e),
    ),
    Metric(
        "toka_request_queue_time_seconds",
        "histogram",
        "From the engine's taking a sequence to the plan that starts it.",
        one(lambda m: m.queue),
    ),
    Metric(
        "toka_request_prefill_time_seconds",
        "histogram",
        "From the plan that starts a sequence to its first token.",
        one(lambda m: m.prefill),
    ),
    Metric(
        "toka_request_decode_time_seconds",
        "histogram",
        "From a sequence's first token to its end.",
        one(lambda m: m.decode),
    ),
    Metric(
        "toka_request_inference_time_seconds",
        "histogram",
        "From the plan that starts a sequence to its end.",
        one(lambda m: m.inference),
    ),
    Metric("toka_request_prompt_tokens", "histogram", "Tokens of a sequence's prompt.", one(lambda m: m.prompt_tokens)),
    Metric(
        "toka_request_generation_tokens",
        "histogram",
        "Tokens that a sequence generated.",
        one(lambda m: m.generation_tokens),
    ),
    Metric(
        "toka_request_max_num_generation_tokens",
        "histogram",
        "Tokens of the longest sequence of a request.",
        one(lambda m: m.longest_generation),
    ),
    Metric(
        "toka_request_params_n",
        "histogram",
        "Samples of each prompt that a request makes the engine draw.",
        one(lambda m: m.params_n),
    ),
    Metric(
        "toka_request_params_max_tokens",
        "histogram",
        "Tokens that a sequence may generate at most.",
        one(lambda m: m.params_max_tokens),
    ),
    Metric(
        "toka_step_tokens",
        "histogram",
        "Tokens that a step runs: those it prefills, and one for each sequence that decodes.",
        one(lambda m: m.step_tokens),
    ),
    Metric(
        "toka_step_duration_seconds",
        "histogram",
        "Time that the device works on a step, by what the step does.",
        lambda m: [((kind,), histogram) for kind, histogram in m.step_duration.items()],
        ("kind",),
    ),
    Metric(
        "toka_step_gap_seconds",
        "histogram",
        "Time that the device stands idle before a step, also where there is nothing to run.",
        one(lambda m: m.step_gap),
    ),
    Metric(
        "toka_scheduler_seconds",
        "histogram",
        "Time that the scheduler takes for a step: to plan, and to take its results in.",
        one(lambda m: m.scheduling),
    ),
    Metric(
        "toka_event_loop_lag_seconds",
        "histogram",
        "How late a timer of the server's event loop is.",
        one(lambda m: m.loop_lag),
        replica=False,
    ),
    Metric(
        "toka_tokenize_queue",
        "gauge",
        "Requests whose texts are being tokenized or wait for it.",
        one(lambda m: m.tokenizing),
        replica=False,
    ),
    Metric(
        "toka_tokenize_seconds",
        "histogram",
        "Time to tokenize a request's texts, the wait for it included.",
        one(lambda m: m.tokenize),
        replica=False,
    ),
    Metric(
        "toka_worker_up",
        "gauge",
        "1 while the worker is ready, else 0.",
        lambda m: [((RANK,), m.state().up)],
        ("rank",),
    ),
    Metric("toka_worker_restarts_total", "counter", "Workers that joined after the first.", one(lambda m: m.restarts)),
    Metric(
        "toka_startup_seconds",
        "gauge",
        "How long the phases of the worker's last start took.",
        lambda m: [((phase,), seconds) for phase, seconds in m.startup.items()],
        ("phase",),
    ),
    Metric(
        "toka_build_info",
        "info",
        "The version of toka, and of Python.",
        lambda m: [((VERSION, platform.python_version()), 1)],
        ("version", "python_version"),
        replica=False,
    ),
    Metric(
        "toka_config_info",
        "info",
        "Options that the server runs with.",
        lambda m: [(tuple(config_labels(m).values()), 1)],
        SHOWN,
    ),
)
