"""Prometheus metrics of a verifier."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from paceline.telemetry.names import PROVIDER, Metric, Span
from paceline.v1 import verifier_pb2
from paceline.verifier.cache import Cache
from paceline.verifier.engine.engine import Engine
from paceline.verifier.engine.job import Prefill, StepOutput
from paceline.verifier.rpc.follow import FollowCounts
from paceline.verifier.store import CacheStore

_COUNTERS = {
    Metric.NUM_DRAFTS: "Trees verified",
    Metric.NUM_DRAFT_TOKENS: "Drafted tokens received",
    Metric.NUM_CHECKED: "Drafted tokens verified; the scheduler left out the others",
    Metric.NUM_ACCEPTED: "Drafted tokens accepted",
    Metric.PROMPT_TOKENS: "Prompt tokens prefilled or reused",
    Metric.CACHED_PROMPT_TOKENS: "Prompt tokens whose KV came from another cache",
    Metric.GENERATION_TOKENS: "Tokens emitted",
    Metric.FREE_RUN_TOKENS: "Tokens emitted without a tree",
    Metric.ROUNDS: "Messages of tokens, of one drafted step or of plain ones",
    Metric.ENGINE_BUSY_SECONDS: "Time the engine spent in steps",
    Metric.ENGINE_STEPS: "Engine steps",
}
_STEP_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)
_HISTOGRAMS = {
    Metric.NODE_BUDGET: (
        "Node budget after a step; 0: drafting does not pay",
        (0, 1, 2, 4, 8, 16, 32, 64, 128, 255),
    ),
    Metric.SCHEDULE_SECONDS: (
        "Time to choose the nodes of a step",
        (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005),
    ),
    Metric.VERIFY_SECONDS: ("Engine time of a round with a tree", _STEP_SECONDS),
    Metric.VERIFY_QUEUE_SECONDS: ("Wait of a round for the engine", _STEP_SECONDS),
    Metric.PREFILL_SECONDS: ("Engine time of a prompt", _STEP_SECONDS),
    Metric.PREFILL_QUEUE_SECONDS: ("Wait of a prompt for its first engine step", _STEP_SECONDS),
    Metric.EMITTED_PER_ROUND: (
        "Tokens emitted by a round with a tree, the bonus token included",
        (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32),
    ),
    Metric.ENGINE_BATCH_TOKENS: (
        "Tokens of all sequences in an engine step",
        tuple(2**power for power in range(13)),
    ),
}
# As in OpenTelemetry's conventions for generative AI; the time per token with finer steps at its
# lower end.
_CONVENTIONAL_HISTOGRAMS = {
    Metric.TIME_TO_FIRST_TOKEN: (
        "From the request for a cache to its first token",
        (
            *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
            *(7.5, 10.0),
        ),
    ),
    Metric.TIME_PER_OUTPUT_TOKEN: (
        "Time per token after the first, mean over a generation",
        (
            *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4),
            *(0.5, 0.75, 1.0, 2.5),
        ),
    ),
}
Joined = Callable[[], Iterable[verifier_pb2.JoinedService]]
_REQUEST_SECONDS = tuple(0.01 * 2**power for power in range(14))


@dataclass(slots=True)
class RequestTimes:
    """Times of one generation (time.perf_counter)."""

    began: float
    first: float = 0.0
    newest: float = 0.0
    tokens: int = 0
    ended: bool = False

    def emitted(self, tokens: int) -> None:
        """Count tokens that were emitted now."""
        self.newest = perf_counter()
        if not self.tokens:
            self.first = self.newest
        self.tokens += tokens


class VerifierMetrics:
    """Counters and histograms of one verifier. Gauges are read when scraped.

    Used on the event loop, except `step`, which the engine thread calls.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model: verifier_pb2.GetModelResponse,
        store: CacheStore,
        engine: Engine,
        follows: FollowCounts,
        joined: Joined,
    ) -> None:
        """Add the metrics of a verifier to a registry.

        Args:
            registry: The registry.
            model: The served model.
            store: The caches.
            engine: The engine.
            follows: Counts of streams that follow caches.
            joined: Lists the drafter services that have joined.
        """
        labels = {"model_name": model.name}
        conventional = {
            "gen_ai_operation_name": Span.GENERATION,
            "gen_ai_provider_name": PROVIDER,
            "gen_ai_request_model": model.name,
        }
        self._counters: dict[str, Counter] = {
            name: Counter(name, text, labels, registry=registry).labels(**labels)
            for name, text in _COUNTERS.items()
        }
        self._histograms: dict[str, Histogram] = {
            name: Histogram(name, text, values, registry=registry, buckets=buckets).labels(**values)
            for histograms, values in (
                (_HISTOGRAMS, labels),
                (_CONVENTIONAL_HISTOGRAMS, conventional),
            )
            for name, (text, buckets) in histograms.items()
        }
        self._accepted_at = Counter(
            Metric.NUM_ACCEPTED_PER_POS,
            "Trees whose drafted token at that depth was accepted, the first depth being 0",
            (*labels, "position"),
            registry=registry,
        )
        self._duration = Histogram(
            Metric.REQUEST_DURATION,
            "From the request for a cache to the last token",
            (*conventional, "error_type"),
            registry=registry,
            buckets=_REQUEST_SECONDS,
        )
        self._model_name = model.name
        self._conventional = tuple(conventional.values())
        target = {
            **labels,
            "architecture": model.architecture,
            "dtype": model.dtype,
            "fingerprint": model.target_fingerprint,
            "batch_invariant": str(model.batch_invariant).lower(),
        }
        info = Gauge(f"{Metric.TARGET}_info", "The served model", target, registry=registry)
        info.labels(**target).set(1)
        registry.register(_State(store, engine, follows, joined, model.name))

    def admitted(self, cache: Cache) -> None:
        """A cache was admitted: its generation begins."""
        cache.request = RequestTimes(perf_counter())

    def prefilled(self, cache: Cache, prefill: Prefill) -> None:
        """A prefill ended. One without a first token is not counted."""
        if prefill.output is None:
            return
        self._count(Metric.PROMPT_TOKENS, len(cache.sequence.generation.prompt))
        self._count(Metric.CACHED_PROMPT_TOKENS, prefill.reused)
        self._count(Metric.GENERATION_TOKENS)
        self._observe(Metric.PREFILL_SECONDS, prefill.step_us / 1e6)
        self._observe(Metric.PREFILL_QUEUE_SECONDS, prefill.queue_us / 1e6)
        request = cache.request
        if request is not None:
            request.emitted(1)
            self._observe(Metric.TIME_TO_FIRST_TOKEN, request.first - request.began)
            self._finish(cache)

    def answered(self, cache: Cache, output: StepOutput) -> None:
        """A step, or consecutive plain ones, were answered."""
        emitted, accepted = len(output.tokens), len(output.accepted)
        self._observe(Metric.NODE_BUDGET, output.node_budget)
        self._count(Metric.ROUNDS)
        self._count(Metric.GENERATION_TOKENS, emitted)
        self._observe(Metric.VERIFY_QUEUE_SECONDS, output.queue_us / 1e6)
        if output.draft is not None:
            self._count(Metric.NUM_DRAFTS)
            self._count(Metric.NUM_DRAFT_TOKENS, len(output.draft.tree))
            self._count(Metric.NUM_CHECKED, output.checked)
            self._count(Metric.NUM_ACCEPTED, accepted)
            for position in range(accepted):
                self._accepted_at.labels(self._model_name, str(position)).inc()
            self._observe(Metric.EMITTED_PER_ROUND, emitted)
            self._observe(Metric.VERIFY_SECONDS, output.step_us / 1e6)
        else:
            self._count(Metric.FREE_RUN_TOKENS, emitted)
        if cache.request is not None:
            cache.request.emitted(emitted)
            self._finish(cache)

    def released(self, cache: Cache, error: str) -> None:
        """A cache was released; `error` names the fault that ended its generation, or is empty."""
        request = cache.request
        if request is None or request.ended:
            return
        request.ended = True
        seconds = request.newest - request.began if request.tokens else 0.0
        self._duration.labels(*self._conventional, error).observe(seconds)
        if request.tokens > 1:
            per_token = (request.newest - request.first) / (request.tokens - 1)
            self._observe(Metric.TIME_PER_OUTPUT_TOKEN, per_token)

    def step(self, seconds: float, tokens: int, decided: float | None) -> None:
        """The engine ran a step. Called on the engine thread."""
        self._count(Metric.ENGINE_STEPS)
        self._count(Metric.ENGINE_BUSY_SECONDS, seconds)
        self._observe(Metric.ENGINE_BATCH_TOKENS, tokens)
        if decided is not None:
            self._observe(Metric.SCHEDULE_SECONDS, decided)

    def _count(self, name: str, amount: float = 1) -> None:
        self._counters[name].inc(amount)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _finish(self, cache: Cache) -> None:
        if cache.sequence.finish is not None:
            self.released(cache, "")


class _State(Collector):
    """State of caches and queues at the time of a scrape."""

    def __init__(
        self,
        store: CacheStore,
        engine: Engine,
        follows: FollowCounts,
        joined: Joined,
        model: str,
    ) -> None:
        self._store = store
        self._engine = engine
        self._follows = follows
        self._joined = joined
        self._model = model

    def collect(self) -> Iterator[Family]:
        """Runs on the endpoint's thread: reads single values and copies only."""
        store, engine, follows = self._store, self._engine, self._follows
        caches = list(store)
        used = sum(each.sequence.segment.reserved_bytes for each in caches)
        kept = sum(each.segment.reserved_bytes for each in store.prefixes)
        limit = store.memory.limit_bytes
        waiting = [cache.job for cache in caches if cache.job is not None and cache.job.queued]
        prefills = sum(isinstance(job, Prefill) for job in waiting)
        running = sum(cache.sequence.finish is None for cache in caches)
        queued = len(waiting) + store.admission.waiting
        device = {"device": str(engine.device)}
        for name, text, value, labels in (
            (Metric.REQUESTS_RUNNING, "Generations that have not ended", running, {}),
            (Metric.REQUESTS_WAITING, "Those waiting for the engine or for KV memory", queued, {}),
            (Metric.LEASES, "Caches", len(caches), {}),
            (Metric.LEASES_LIMIT, "Most caches at once", store.max_sequences, {}),
            (Metric.FOLLOW_STREAMS, "FollowCache streams", follows.streams, {}),
            (Metric.KV_USED_BYTES, "KV memory of caches", used, device),
            (Metric.KV_PREFIX_BYTES, "KV memory of ended texts, freed when needed", kept, device),
            (Metric.KV_LIMIT_BYTES, "KV memory in all", limit, device),
            (Metric.KV_USAGE, "Share of KV memory in use, 0 to 1", used / limit, device),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name", *labels])
            gauge.add_metric([self._model, *labels.values()], value)
            yield gauge
        carriers = Counts(verifier_pb2.Carrier.Name(each.carrier) for each in self._joined())
        links = GaugeMetricFamily(
            Metric.DRAFT_LINKS,
            "Drafter services that have joined, by the carrier of their messages",
            labels=["model_name", "carrier"],
        )
        for carrier in ("CARRIER_SOCKET", "CARRIER_STREAM"):
            word = carrier.removeprefix("CARRIER_").lower()
            links.add_metric([self._model, word], carriers[carrier])
        yield links
        queue = GaugeMetricFamily(
            Metric.ENGINE_QUEUE, "Jobs waiting for an engine step", labels=["model_name", "kind"]
        )
        queue.add_metric([self._model, "round"], len(waiting) - prefills)
        queue.add_metric([self._model, "prefill"], prefills)
        yield queue
        for name, text, value in (
            (Metric.LEASES_EXPIRED, "Caches freed because their lease expired", store.expired),
            (Metric.FOLLOW_UPDATES, "Updates sent to followers", follows.updates),
            (Metric.FOLLOW_BYTES, "Bytes sent to followers", follows.bytes),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
