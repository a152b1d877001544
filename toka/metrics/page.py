"""The text that Prometheus reads, made when it asks. A registry of its own; nothing is global."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from toka.metrics.catalogue import CATALOGUE, Metric, Row
from toka.metrics.histogram import Histogram
from toka.metrics.record import Metrics
from toka.metrics.vllm import aliases

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Page:
    """The catalogue, vLLM's names of it if the options say so, the process and Python's garbage collection."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._shown = [*CATALOGUE, *(aliases() if metrics.config.metrics_compat == "vllm" else ())]
        self._python = CollectorRegistry()
        ProcessCollector(registry=self._python)
        GCCollector(registry=self._python)

    def take(self) -> "Snapshot":
        """Every value of now. On the event loop, whose the values are; it takes a fraction of a millisecond."""
        return Snapshot([(metric, frozen(metric.rows(self._metrics))) for metric in self._shown], self._python)


class Snapshot(Collector):
    """Values of one moment."""

    def __init__(self, values: list[tuple[Metric, list[Row]]], python: CollectorRegistry) -> None:
        self._values = values
        self._python = python

    def collect(self) -> Iterator[Family]:
        """For the encoder."""
        for metric, rows in self._values:
            yield family(metric, rows)
        yield from self._python.collect()

    def render(self) -> bytes:
        """The page, in the plain format: prometheus_client's OpenMetrics takes the colon out of vLLM's names. It takes
        some milliseconds, in whatever thread."""
        return generate_latest(self)


def frozen(rows: list[Row]) -> list[Row]:
    """The same, with histograms that do not change any more."""
    return [(labels, value.copy() if isinstance(value, Histogram) else value) for labels, value in rows]


def family(metric: Metric, rows: list[Row]) -> Family:
    """A metric as prometheus_client knows it."""
    name, labels = metric.name, metric.all_labels
    match metric.kind:
        case "counter":
            counter = CounterMetricFamily(name, metric.help, labels=labels)
            for values, value in rows:
                counter.add_metric(values, number(value))
            return counter
        case "gauge":
            gauge = GaugeMetricFamily(name, metric.help, labels=labels)
            for values, value in rows:
                gauge.add_metric(values, number(value))
            return gauge
        case "info":
            info = InfoMetricFamily(name.removesuffix("_info"), metric.help)
            for values, _ in rows:
                info.add_metric((), dict(zip(labels, values, strict=True)))
            return info
        case "histogram":
            histogram = HistogramMetricFamily(name, metric.help, labels=labels)
            for values, value in rows:
                assert isinstance(value, Histogram)
                histogram.add_metric(values, buckets(value), value.sum)
            return histogram


def number(value: float | Histogram) -> float:
    """The value of a counter or a gauge."""
    assert not isinstance(value, Histogram)
    return float(value)


def buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper border."""
    borders = [*map(floatToGoString, histogram.bounds), "+Inf"]
    return list(zip(borders, accumulate(histogram.counts), strict=True))
