"""Tables of Prometheus metrics: each is declared once, and counted or read by its declaration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

# A number, or numbers by the values of the labels that are not the same for the whole process.
Values = float | Mapping[Any, float]


Read = Callable[[Any], Values]


@dataclass(frozen=True, eq=False)
class Metric:
    """A counter or a histogram that is added to, or a counter or gauge that is read."""

    kind: str  # as Prometheus calls it
    name: str  # as in Prometheus, without the `_total` of counters
    text: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()  # of a histogram
    read: Read | None = None  # called with the :class:`Metrics` when scraped


class Table(list[Metric]):
    """The metrics of a process, all with some labels before their own."""

    def __init__(self, *labels: str) -> None:
        self._labels = labels

    def counter(self, name: str, text: str, *labels: str, read: Read | None = None) -> Metric:
        return self._add("counter", name, text, labels, read=read)

    def histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Metric:
        return self._add("histogram", name, text, labels, tuple(buckets))

    def gauge(self, name: str, text: str, read: Read, *labels: str) -> Metric:
        return self._add("gauge", name, text, labels, read=read)

    def _add(
        self, kind: str, name: str, text: str, labels: tuple[str, ...], *more: Any, **read: Any
    ) -> Metric:
        self.append(Metric(kind, name, text, (*self._labels, *labels), *more, **read))
        return self[-1]


class Metrics(Collector):
    """The metrics of a table in a registry."""

    def __init__(self, registry: CollectorRegistry, table: Iterable[Metric], **same: str) -> None:
        """Add the metrics to a registry; ``same`` are labels that the whole process has."""
        self._table, self._same = list(table), same
        self._added: dict[Metric, Any] = {}
        for metric in self._table:
            buckets = {"buckets": metric.buckets} if metric.buckets else {}
            kind: Any = Histogram if buckets else Counter
            if metric.read is None:
                added = kind(metric.name, metric.text, metric.labels, registry=None, **buckets)
                self._added[metric] = added
                if metric.labels and same.keys() >= set(metric.labels):
                    added.labels(*self._fixed(metric))  # shown as 0 from now on
        registry.register(self)

    def add(self, metric: Metric, value: float = 1, *labels: str) -> None:
        """Add to a counter, or a value to a histogram; ``labels`` are those that differ."""
        added = self._added[metric]
        if metric.labels:
            added = added.labels(*self._fixed(metric), *labels)
        (added.observe if metric.buckets else added.inc)(value)

    def remove(self, series: Mapping[str, str]) -> None:
        """Remove the series with these values of labels, of all metrics that have the labels."""
        for metric, added in self._added.items():
            if series.keys() <= set(metric.labels):
                added.remove_by_labels(dict(series))

    def describe(self) -> Iterator[Family]:
        """Return names and kinds, by which a registry refuses a second metric of a name."""
        return (Family(metric.name, metric.text, metric.kind) for metric in self._table)

    def collect(self) -> Iterator[Family]:
        """Yield all metrics in the order of the table. Runs on the endpoint's thread."""
        for metric in self._table:
            if metric.read is None:
                yield from self._added[metric].collect()
                continue
            kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            family = kind(metric.name, metric.text, labels=metric.labels)
            values = metric.read(self)
            for labels, value in (values if isinstance(values, Mapping) else {(): values}).items():
                differing = labels if isinstance(labels, tuple) else (labels,)
                family.add_metric([*self._fixed(metric), *differing], value)
            yield family

    def _fixed(self, metric: Metric) -> list[str]:
        return [self._same[label] for label in metric.labels if label in self._same]
