"""What a drafter service counts for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from paceline.drafter.recordings import Recorder
from paceline.drafter.registry import Registry, Version
from paceline.drafter.session import Session
from paceline.drafter.worker import Drafted, DraftWorker
from paceline.telemetry.names import Metric

_LABELS = ("drafter", "version", "method")
_SECONDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.008, 0.012, 0.02, 0.05, 0.1, 0.2),
    *(0.5, 1.0, 2.0),
)
_STATES = ("active", "trial", "standby", "draining")
Labels = tuple[str, str, str]


class DrafterMetrics(Collector):
    """Counters and histograms by version; what is only a state is read when scraped.

    Belongs to the event loop, but for `collect`. The series of a version go when it is unloaded,
    so that a service that is fed new ones for months does not keep them all.
    """

    def __init__(
        self,
        metrics: CollectorRegistry,
        drafters: Registry,
        worker: DraftWorker,
        recorder: Recorder | None = None,
    ) -> None:
        """Add the metrics of a drafter service to a registry of metrics.

        Args:
            metrics: Where to.
            drafters: What is loaded.
            worker: The thread that drafts.
            recorder: Keeps texts; None: nobody does.
        """
        self._drafters = drafters
        self._worker = worker
        self._recorder = recorder
        metrics.register(self)  # first: what it forgets must not be shown once more
        self._rounds = Counter(
            Metric.DRAFTER_ROUNDS,
            "Rounds answered, empty trees included",
            _LABELS,
            registry=metrics,
        )
        self._tokens = Counter(
            Metric.DRAFTER_DRAFT_TOKENS, "Tokens drafted", _LABELS, registry=metrics
        )
        self._seconds = Histogram(
            Metric.DRAFTER_DRAFT_SECONDS,
            "Time to draft a tree",
            _LABELS,
            registry=metrics,
            buckets=_SECONDS,
        )
        self._queued = Histogram(
            Metric.DRAFTER_QUEUE_SECONDS,
            "Wait of a round for other sequences",
            _LABELS,
            registry=metrics,
            buckets=_SECONDS,
        )
        self._mapped = Gauge(
            Metric.DRAFTER_MAPPED_KV_BYTES,
            "KV of verifiers that is mapped, at its largest: their memory, not this process's",
            registry=metrics,
        )
        self._sessions: set[Session] = set()
        # Of sessions that have ended:
        self._updates = self._bytes = 0
        self._counted: set[Labels] = set()

    def drafted(self, version: Version, drafted: Drafted) -> None:
        """A round was answered."""
        labels = _labels(version)
        self._rounds.labels(*labels).inc()
        self._tokens.labels(*labels).inc(len(drafted.tree.tokens))
        self._seconds.labels(*labels).observe(drafted.draft_seconds)
        self._queued.labels(*labels).observe(drafted.queue_seconds)
        self._counted.add(labels)

    def attached(self, session: Session) -> None:
        """A generation has what it needs."""
        self._sessions.add(session)
        self._mapped.inc(session.kv_bytes)

    def detached(self, session: Session) -> None:
        """A generation left."""
        self._sessions.discard(session)
        self._mapped.dec(session.kv_bytes)
        self._updates += session.follows.updates
        self._bytes += session.follows.bytes

    def collect(self) -> Iterator[Family]:
        """State of all versions, and of the queue. On the endpoint's thread."""
        versions = self._drafters.versions()
        self._forget_all_but({_labels(version) for version in versions})
        yield _family(
            Metric.DRAFTER_STREAMS,
            "Generations attached",
            {_labels(version): len(version.evictions) for version in versions},
        )
        yield _family(
            Metric.DRAFTER_TRAFFIC_SHARE,
            "Share of new generations of its name, 0 to 1",
            {_labels(version): version.share for version in versions},
        )
        yield _family(
            Metric.DRAFTER_WEIGHT_BYTES,
            "Memory of its weights",
            {_labels(version): version.drafter.weight_bytes for version in versions},
        )
        states = GaugeMetricFamily(
            Metric.DRAFTER_STATE, "1 for the state it is in", labels=[*_LABELS, "state"]
        )
        for version in versions:
            for state in _STATES:
                states.add_metric([*_labels(version), state], state == _state(version))
        yield states
        yield GaugeMetricFamily(
            Metric.DRAFTER_QUEUE, "Rounds that wait for the drafting thread", self._worker.waiting
        )

        yield from self._followed()
        yield from self._texts()

    def _texts(self) -> Iterator[Family]:
        """What is kept to learn from."""
        recorder = self._recorder
        yield GaugeMetricFamily(
            Metric.DRAFTER_RECORDING,
            "1 while texts of generations are kept on disk",
            recorder is not None and recorder.recording,
        )
        if recorder is not None:
            yield CounterMetricFamily(
                Metric.DRAFTER_RECORDED_TEXTS, "Texts that were kept", recorder.recorded
            )
            yield CounterMetricFamily(
                Metric.DRAFTER_LOST_TEXTS, "Texts that could not be kept", recorder.lost
            )

    def _followed(self) -> Iterator[Family]:
        """What all generations follow, together."""
        found = [session.follows for session in tuple(self._sessions)]
        following = [each for each in found if each.bytes]
        yield GaugeMetricFamily(
            Metric.DRAFTER_FOLLOWED_STREAMS, "Generations that follow a cache", len(following)
        )
        yield GaugeMetricFamily(
            Metric.DRAFTER_FOLLOWED_POSITIONS,
            "Positions of a layer that they hold, or know as chosen",
            sum(each.positions for each in following),
        )
        yield CounterMetricFamily(
            Metric.DRAFTER_FOLLOWED_UPDATES,
            "Updates taken in",
            self._updates + sum(each.updates for each in following),
        )
        yield CounterMetricFamily(
            Metric.DRAFTER_FOLLOWED_BYTES,
            "Bytes that came from verifiers",
            self._bytes + sum(each.bytes for each in following),
        )

    def _forget_all_but(self, loaded: set[Labels]) -> None:
        for labels in self._counted - loaded:
            self._counted.discard(labels)
            for metric in (self._rounds, self._tokens, self._seconds, self._queued):
                metric.remove(*labels)


def _labels(version: Version) -> Labels:
    return version.spec.name, version.version, version.spec.method


def _state(version: Version) -> str:
    if version.draining:
        return "draining"
    if version.on_trial:
        return "trial"
    return "active" if version.share else "standby"


def _family(name: str, what: str, values: dict[Labels, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, what, labels=_LABELS)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
