"""Prometheus metrics of the drafter service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from paceline.drafter.registry import Registry, Version
from paceline.drafter.session import Drafted, Session
from paceline.drafter.worker import DraftWorker
from paceline.telemetry.names import Metric
from paceline.v1 import drafter_pb2

_LABELS = ("drafter", "version", "method")
_SECONDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.008, 0.012, 0.02, 0.05, 0.1, 0.2),
    *(0.5, 1.0, 2.0),
)
_STATES = ("active", "idle", "failing", "draining")
Labels = tuple[str, str, str]


class DrafterMetrics(Collector):
    """Counters and histograms by version, and gauges read when scraped.

    Use it on the drafting thread, except `collect`, which runs on the endpoint's thread. The series
    of an unloaded version are removed.
    """

    def __init__(
        self,
        metrics: CollectorRegistry,
        drafters: Registry,
        worker: DraftWorker,
        links: Callable[[], Sequence[drafter_pb2.VerifierLink]],
    ) -> None:
        self._drafters = drafters
        self._worker = worker
        self._links = links
        metrics.register(self)  # first: series removed by `collect` must not be shown again

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, _LABELS, registry=metrics)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(name, text, _LABELS, registry=metrics, buckets=_SECONDS)

        self._rounds = counter(
            Metric.DRAFTER_ROUNDS, "Rounds that were answered, with a tree or an empty one"
        )
        self._tokens = counter(
            Metric.DRAFTER_DRAFT_TOKENS,
            "Tokens of all trees, also of those that came too late to be verified",
        )
        self._seconds = seconds(
            Metric.DRAFTER_DRAFT_SECONDS, "Time to draft a tree, without waiting"
        )
        self._queued = seconds(
            Metric.DRAFTER_QUEUE_SECONDS, "Time that a round waits for other sequences"
        )
        self._series: set[Labels] = set()
        self._sessions: set[Session] = set()
        # Of closed sessions:
        self._updates = self._bytes = 0

    def drafted(self, version: Version, drafted: Drafted) -> None:
        labels = _labels(version)
        self._rounds.labels(*labels).inc()
        self._tokens.labels(*labels).inc(len(drafted.tree.tokens))
        self._seconds.labels(*labels).observe(drafted.draft_seconds)
        self._queued.labels(*labels).observe(drafted.queue_seconds)
        self._series.add(labels)

    def opened(self, session: Session) -> None:
        self._sessions.add(session)

    def closed(self, session: Session) -> None:
        self._sessions.discard(session)
        if session.kv is not None:
            self._updates += session.kv.updates
            self._bytes += session.kv.received

    def collect(self) -> Iterator[Family]:
        """Gauges of all versions, the queue and the KV."""
        versions = {_labels(version): version for version in self._drafters.versions()}
        for removed in self._series - set(versions):
            self._series.discard(removed)
            for metric in (self._rounds, self._tokens, self._seconds, self._queued):
                metric.remove(*removed)
        yield _gauge(
            Metric.DRAFTER_STREAMS,
            "Texts that are open at the version",
            {labels: len(version.streams) for labels, version in versions.items()},
        )
        yield _gauge(
            Metric.DRAFTER_TRAFFIC,
            "Share of the new texts that name its drafter, 0 to 1",
            {labels: version.share for labels, version in versions.items()},
        )
        yield _gauge(
            Metric.DRAFTER_WEIGHT_BYTES,
            "Memory of the weights of the version",
            {labels: version.drafter.weight_bytes for labels, version in versions.items()},
        )
        yield _gauge(
            Metric.DRAFTER_STATE,
            "1 for the state of the version, as `paceline drafters list` shows it",
            {
                (*labels, state): state == _state(version)
                for labels, version in versions.items()
                for state in _STATES
            },
            (*_LABELS, "state"),
        )
        yield GaugeMetricFamily(
            Metric.DRAFTER_QUEUE, "Rounds that wait for the drafting thread", self._worker.waiting
        )
        carriers = [link.carrier for link in self._links()]
        yield _gauge(
            Metric.DRAFTER_LINKS,
            "Verifiers that were joined, by socket or gRPC stream",
            {(carrier,): carriers.count(carrier) for carrier in ("socket", "stream")},
            ("carrier",),
        )
        yield from self._collect_kv()

    def _collect_kv(self) -> Iterator[Family]:
        sessions = tuple(self._sessions)
        remote = [s.kv for s in sessions if s.kv is not None and s.kv.received]
        yield GaugeMetricFamily(
            Metric.DRAFTER_MAPPED_KV_BYTES,
            "KV of verifiers that is mapped, at its largest: their memory, not this process's",
            sum(session.mapped_bytes for session in sessions),
        )
        yield GaugeMetricFamily(
            Metric.DRAFTER_FOLLOWED_STREAMS, "Texts whose KV is copied over gRPC", len(remote)
        )
        yield GaugeMetricFamily(
            Metric.DRAFTER_FOLLOWED_POSITIONS,
            "Positions of a layer whose KV was copied",
            sum(kv.positions for kv in remote),
        )
        yield CounterMetricFamily(
            Metric.DRAFTER_FOLLOWED_UPDATES,
            "Updates of KV received over gRPC",
            self._updates + sum(kv.updates for kv in remote),
        )
        yield CounterMetricFamily(
            Metric.DRAFTER_FOLLOWED_BYTES,
            "Bytes of KV and hidden states received over gRPC",
            self._bytes + sum(kv.received for kv in remote),
        )


def _labels(version: Version) -> Labels:
    return version.spec.name, version.version, version.spec.method


def _state(version: Version) -> str:
    if version.draining:
        return "draining"
    if version.failing:
        return "failing"
    return "active" if version.share else "idle"


def _gauge(
    name: str, text: str, values: dict[tuple[str, ...], float], labels: tuple[str, ...] = _LABELS
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
