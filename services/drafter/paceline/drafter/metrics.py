"""Prometheus metrics of the drafter service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family

from paceline.drafter.registry import Registry, Version
from paceline.drafter.session import Drafted
from paceline.drafter.worker import DraftWorker
from paceline.telemetry.metrics import Metrics, Table
from paceline.v1 import drafter_pb2

_SECONDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.008, 0.012, 0.02, 0.05, 0.1, 0.2),
    *(0.5, 1.0, 2.0),
)
T = TypeVar("T")
_STATES = ("active", "idle", "failing", "draining")
_VERSION = ("drafter", "version", "method")

_TABLE = Table()
_count, _gauge = _TABLE.counter, _TABLE.gauge
_ROUNDS = _count(
    "specdec_drafter_rounds", "Rounds that were answered, with a tree or an empty one", *_VERSION
)
_TOKENS = _count(
    "specdec_drafter_draft_tokens",
    "Tokens of all trees, also of those that came too late to be verified",
    *_VERSION,
)
_DRAFTING = _TABLE.histogram(
    "specdec_drafter_draft_seconds", "Time to draft a tree, without waiting", _SECONDS, *_VERSION
)
_QUEUED = _TABLE.histogram(
    "specdec_drafter_queue_seconds", "Time that a round waits for other sequences",
    _SECONDS, *_VERSION,
)  # fmt: skip
_gauge(
    "specdec_drafter_streams", "Texts that are open at the version",
    lambda it: it.by_version(lambda version: len(version.streams)), *_VERSION,
)  # fmt: skip
_gauge(
    "specdec_drafter_traffic_ratio", "Share of the new texts that name its drafter, 0 to 1",
    lambda it: it.by_version(lambda version: version.share), *_VERSION,
)  # fmt: skip
_gauge(
    "specdec_drafter_weight_bytes", "Memory of the weights of the version",
    lambda it: it.by_version(lambda version: version.drafter.weight_bytes), *_VERSION,
)  # fmt: skip
_gauge(
    "specdec_drafter_state", "1 for the state of the version, as `paceline drafters list` shows it",
    lambda it: {
        (*labels, state): state == current
        for labels, current in it.by_version(_state).items()
        for state in _STATES
    },
    *_VERSION, "state",
)  # fmt: skip
_gauge(
    "specdec_drafter_queue_length", "Rounds that wait for the drafting thread",
    lambda it: it.worker.waiting,
)  # fmt: skip
_gauge(
    "specdec_drafter_links", "Verifiers that were joined, by socket or gRPC stream",
    lambda it: {
        carrier: sum(link.carrier == carrier for link in it.links())
        for carrier in ("socket", "stream")
    },
    "carrier",
)  # fmt: skip


class DrafterMetrics(Metrics):
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
        self._drafters, self.worker, self.links = drafters, worker, links
        self._series: set[tuple[str, ...]] = set()
        super().__init__(metrics, _TABLE)

    def drafted(self, version: Version, drafted: Drafted) -> None:
        labels = _labels(version)
        self.add(_ROUNDS, 1, *labels)
        self.add(_TOKENS, len(drafted.tree.tokens), *labels)
        self.add(_DRAFTING, drafted.draft_seconds, *labels)
        self.add(_QUEUED, drafted.queue_seconds, *labels)
        self._series.add(labels)

    def collect(self) -> Iterator[Family]:
        """Return the gauges of all versions, the queue and the KV."""
        for removed in self._series - set(map(_labels, self._drafters.versions())):
            self._series.discard(removed)
            self.remove(dict(zip(_VERSION, removed, strict=True)))
        return super().collect()

    def by_version(self, value: Callable[[Version], T]) -> dict[tuple[str, ...], T]:
        return {_labels(version): value(version) for version in self._drafters.versions()}


def _labels(version: Version) -> tuple[str, ...]:
    return version.spec.name, version.version, version.spec.method


def _state(version: Version) -> str:
    if version.draining:
        return "draining"
    if version.failing:
        return "failing"
    return "active" if version.share else "idle"
