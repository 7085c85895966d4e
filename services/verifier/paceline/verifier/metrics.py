"""Prometheus metrics of a verifier."""

from __future__ import annotations

from collections import Counter as Counts
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from paceline.decoder import GraphRunner
from paceline.service.phases import phases
from paceline.telemetry.names import PROVIDER, Metric, Span
from paceline.v1 import verifier_pb2
from paceline.verifier.engine.drafted import StepReport, shares
from paceline.verifier.engine.engine import Engine
from paceline.verifier.engine.job import Prefill
from paceline.verifier.store import Cache, CacheStore, RequestTimes
from paceline.verifier.telemetry import DRAFTER, FollowCounts

_MODEL = ("model_name",)
_DRAFTER = (*_MODEL, "drafter", "version")
_TEXT = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")

# Number of drafters' versions with series of their own. Those used longest ago are removed.
_MAX_VERSIONS = 64

_STEP_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)

ROUND_METRICS = (  # those of every engine that drafts
    *(Metric.ROUNDS, Metric.GENERATION_TOKENS, Metric.FREE_RUN_TOKENS, Metric.NUM_DRAFTS),
    *(Metric.NUM_DRAFT_TOKENS, Metric.NUM_CHECKED, Metric.NUM_ACCEPTED),
    *(Metric.NUM_ACCEPTED_PER_POS, Metric.EMITTED_PER_ROUND, Metric.DRAFT_SECONDS),
)


class _Described(NamedTuple):
    """A counter, or a histogram with buckets."""

    labels: tuple[str, ...]
    text: str
    buckets: tuple[float, ...] = ()


# Those of texts have the buckets of OpenTelemetry's conventions for generative AI; the time per
# token with finer steps at its lower end.
_METRICS = {
    Metric.ROUNDS: _Described(
        (*_DRAFTER, "no_draft"),
        "Rounds, by the reason why they have no tree, empty with one; plain steps whose tokens are "
        "sent together are one round",
    ),
    Metric.NUM_DRAFTS: _Described(_DRAFTER, "Rounds with a tree"),
    Metric.NUM_DRAFT_TOKENS: _Described(_DRAFTER, "Tokens of the trees that came in time"),
    Metric.NUM_CHECKED: _Described(
        _DRAFTER, "Drafted tokens that the target checked, as scheduled"
    ),
    Metric.NUM_ACCEPTED: _Described(_DRAFTER, "Drafted tokens that equal the target's own choice"),
    Metric.SOURCE_TOKENS: _Described(
        (*_MODEL, "source", "stage"),
        "Drafted tokens by the source that was the first to propose them (a local one, or drafter) "
        "and stage: drafted, checked, accepted",
    ),
    Metric.NUM_ACCEPTED_PER_POS: _Described(
        (*_DRAFTER, "position"),
        "Trees whose token at this depth was accepted; the first depth is 0",
    ),
    Metric.REQUESTS: _Described(
        (*_MODEL, "finish_reason"),
        "Texts that ended: stop, length, or why they ended early, such as released by the client, "
        "cancelled, lease_expired, preempted",
    ),
    Metric.PROMPT_TOKENS: _Described(
        _MODEL, "Tokens of prompts, computed or taken from another cache"
    ),
    Metric.CACHED_PROMPT_TOKENS: _Described(
        _MODEL, "Prompt tokens whose KV was taken from another cache"
    ),
    Metric.GENERATION_TOKENS: _Described(
        _MODEL, "Tokens sent: accepted drafts and the target's own"
    ),
    Metric.FREE_RUN_TOKENS: _Described(_MODEL, "Tokens emitted by steps without a tree"),
    Metric.ENGINE_BUSY_SECONDS: _Described(
        _MODEL, "Time in which a step ran; its rate is utilisation"
    ),
    Metric.ENGINE_STEPS: _Described(_MODEL, "Forward passes of the target"),
    Metric.DRAFT_SECONDS: _Described(
        _DRAFTER,
        "Time from the request of a tree until it came",
        _STEP_SECONDS,
    ),
    Metric.EMITTED_PER_ROUND: _Described(
        _DRAFTER,
        "Tokens emitted by a round with a tree, the target's own one included",
        (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32),
    ),
    Metric.NODE_BUDGET: _Described(
        _MODEL,
        "Drafted tokens that the scheduler asks for after a step; 0: drafting does not pay",
        (0, 1, 2, 4, 8, 16, 32, 64, 128, 255),
    ),
    Metric.SCHEDULE_SECONDS: _Described(
        _MODEL,
        "Time that the scheduler takes to choose the drafted tokens of a step",
        (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005),
    ),
    Metric.VERIFY_SECONDS: _Described(
        _MODEL, "Time of the step that verifies a tree", _STEP_SECONDS
    ),
    Metric.VERIFY_QUEUE_SECONDS: _Described(
        _MODEL, "Time that a round waits for its step", _STEP_SECONDS
    ),
    Metric.PREFILL_SECONDS: _Described(_MODEL, "Time of all steps of a prompt", _STEP_SECONDS),
    Metric.PREFILL_QUEUE_SECONDS: _Described(
        _MODEL,
        "Time that a prompt waits for its first step",
        _STEP_SECONDS,
    ),
    Metric.ENGINE_BATCH_TOKENS: _Described(
        _MODEL,
        "Tokens of all sequences in one forward pass",
        tuple(2**power for power in range(13)),
    ),
    Metric.REQUEST_DURATION: _Described(
        (*_TEXT, "error_type"),
        "Time from the request of a text to its last token",
        tuple(0.01 * 2**power for power in range(14)),
    ),
    Metric.TIME_TO_FIRST_TOKEN: _Described(
        _TEXT,
        "Time from the request of a text to its first token",
        (
            *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
            *(7.5, 10.0),
        ),
    ),
    Metric.TIME_PER_OUTPUT_TOKEN: _Described(
        _TEXT,
        "Mean time between two tokens of a text",
        (
            *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4),
            *(0.5, 0.75, 1.0, 2.5),
        ),
    ),
}


class RoundMetrics:
    """Counters and histograms of rounds, by drafter."""

    def __init__(
        self, registry: CollectorRegistry, model: str, names: Iterable[str] = ROUND_METRICS
    ) -> None:
        """Add those of the given names to a registry; ``model`` is the name of the target."""
        fixed = {"model_name": model, "gen_ai_request_model": model}
        fixed |= {"gen_ai_operation_name": Span.GENERATION, "gen_ai_provider_name": PROVIDER}
        self._metrics: dict[str, Counter | Histogram] = {}
        self._fixed: dict[str, list[str]] = {}  # values of the first labels of each metric
        for name in names:
            labels, text, buckets = _METRICS[name]
            self._metrics[name] = (
                Histogram(name, text, labels, registry=registry, buckets=buckets)
                if buckets
                else Counter(name, text, labels, registry=registry)
            )
            self._fixed[name] = [fixed[label] for label in labels if label in fixed]
            if len(self._fixed[name]) == len(labels):
                self._metrics[name].labels(*self._fixed[name])  # shown as 0 from now on
        self._versions: OrderedDict[tuple[str, str], None] = OrderedDict()

    def round(self, report: StepReport) -> None:
        """A round, or consecutive plain ones."""
        emitted, accepted, draft = len(report.output.tokens), len(report.accepted), report.draft
        drafter = self._drafter(report)
        reason = "" if report.no_draft is None else report.no_draft.value
        self._add(Metric.GENERATION_TOKENS, emitted)
        self._add(Metric.ROUNDS, 1, *drafter, reason)
        if draft is None:
            self._add(Metric.FREE_RUN_TOKENS, emitted)
            return
        self._add(Metric.NUM_DRAFTS, 1, *drafter)
        self._add(Metric.NUM_DRAFT_TOKENS, len(draft.tree), *drafter)
        self._add(Metric.NUM_CHECKED, report.output.checked, *drafter)
        self._add(Metric.NUM_ACCEPTED, accepted, *drafter)
        for position in range(accepted):
            self._add(Metric.NUM_ACCEPTED_PER_POS, 1, *drafter, str(position))
        self._add(Metric.EMITTED_PER_ROUND, emitted, *drafter)
        self._add(Metric.DRAFT_SECONDS, draft.seconds, *drafter)

    def _drafter(self, report: StepReport) -> tuple[str, str]:
        """Name and version of a round's drafter; empty without one.

        A drafter service may announce any number of versions, so series of old ones are removed.
        """
        if report.drafter is None:
            return "", ""
        drafter = report.drafter.name, report.drafter.version
        self._versions[drafter] = None
        self._versions.move_to_end(drafter)
        if len(self._versions) > _MAX_VERSIONS:
            oldest, _ = self._versions.popitem(last=False)
            match = dict(zip(_DRAFTER[1:], oldest, strict=True))
            for name, metric in self._metrics.items():
                if _METRICS[name].labels[: len(_DRAFTER)] == _DRAFTER:
                    metric.remove_by_labels(match)
        return drafter

    def _add(self, name: str, value: float, *labels: str) -> None:
        """Add to a counter, or a value to a histogram; `labels` are those that are not fixed."""
        metric = self._metrics[name].labels(*self._fixed[name], *labels)
        if isinstance(metric, Counter):
            metric.inc(value)
        else:
            metric.observe(value)


class VerifierMetrics(RoundMetrics, Collector):
    """Counters and histograms of one verifier. Gauges are read when scraped.

    Used on the event loop, except `step`, which the engine thread calls, and `collect`, which runs
    on the endpoint's thread.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model: verifier_pb2.GetModelResponse,
        store: CacheStore,
        engine: Engine,
        follows: FollowCounts,
        joined: Callable[[], Iterable[verifier_pb2.JoinedService]],
        graphs: GraphRunner | None = None,
    ) -> None:
        """Add the metrics of a verifier to a registry; ``joined`` lists the services that have
        joined, and ``graphs`` are its CUDA graphs."""
        self._model, self._store, self._engine = model.name, store, engine
        self._follows, self._joined, self._graphs, self._facts = follows, joined, graphs, model
        super().__init__(registry, model.name, _METRICS)
        registry.register(self)

    def admitted(self, cache: Cache) -> None:
        """A cache was admitted: its generation begins."""
        cache.request = RequestTimes(perf_counter())

    def prefilled(self, cache: Cache, prefill: Prefill) -> None:
        """A prefill ended. One without a first token is not counted."""
        if prefill.output is None:
            return
        self._add(Metric.PROMPT_TOKENS, cache.sequence.text.prompt_length)
        self._add(Metric.CACHED_PROMPT_TOKENS, prefill.reused)
        self._add(Metric.GENERATION_TOKENS, 1)
        self._add(Metric.PREFILL_SECONDS, prefill.step_us / 1e6)
        self._add(Metric.PREFILL_QUEUE_SECONDS, prefill.queue_us / 1e6)
        request = cache.request
        if request is not None:
            request.emitted(1)
            self._add(Metric.TIME_TO_FIRST_TOKEN, request.first - request.began)
            self._finish(cache)

    def answered(self, cache: Cache, report: StepReport) -> None:
        """A step, or consecutive plain ones, were answered."""
        self.round(report)
        for source, *counts in shares(report):
            for stage, count in zip(("drafted", "checked", "accepted"), counts, strict=True):
                self._add(Metric.SOURCE_TOKENS, count, source or DRAFTER, stage)
        self._add(Metric.NODE_BUDGET, report.node_budget)
        self._add(Metric.VERIFY_QUEUE_SECONDS, report.queue_us / 1e6)
        if report.draft is not None:
            self._add(Metric.VERIFY_SECONDS, report.step_us / 1e6)
        if cache.request is not None:
            cache.request.emitted(len(report.output.tokens))
            self._finish(cache)

    def released(self, cache: Cache, error: str) -> None:
        """A cache was released; `error` names the fault that ended its generation, or is empty."""
        request = cache.request
        if request is None or request.ended:
            return
        request.ended = True
        finish = cache.sequence.finish
        reason = error or ("released" if finish is None else finish.value)
        self._add(Metric.REQUESTS, 1, "cancelled" if reason == "CancelledError" else reason)
        seconds = request.newest - request.began if request.tokens else 0.0
        self._add(Metric.REQUEST_DURATION, seconds, error)
        if request.tokens > 1:
            per_token = (request.newest - request.first) / (request.tokens - 1)
            self._add(Metric.TIME_PER_OUTPUT_TOKEN, per_token)

    def step(self, seconds: float, tokens: int, decided: float | None) -> None:
        """The engine ran a step. Called on the engine thread."""
        self._add(Metric.ENGINE_STEPS, 1)
        self._add(Metric.ENGINE_BUSY_SECONDS, seconds)
        self._add(Metric.ENGINE_BATCH_TOKENS, tokens)
        if decided is not None:
            self._add(Metric.SCHEDULE_SECONDS, decided)

    def _finish(self, cache: Cache) -> None:
        if cache.sequence.finish is not None:
            self.released(cache, "")

    def _target(self) -> Family:
        model = self._facts
        target = {
            "model_name": model.name,
            "architecture": model.architecture,
            "dtype": model.dtype,
            "weights": model.weights,
            "weights_kept": model.weights_kept,
            "fingerprint": model.target_fingerprint,
            "batch_invariant": str(model.batch_invariant).lower(),
        }
        text = "1, with facts of the served model"
        info = GaugeMetricFamily(f"{Metric.TARGET}_info", text, labels=list(target))
        info.add_metric(list(target.values()), 1)
        return info

    def _unused(self) -> Family:
        text = "1: a drafter that texts name or have by default drafts in hardly any step; why"
        labels = ["model_name", "drafter", "reason"]
        gauge = GaugeMetricFamily(Metric.UNUSED_DRAFTERS, text, labels=labels)
        for name, reason in self._engine.unused_drafters:
            gauge.add_metric([self._model, name, reason], 1)
        return gauge

    def _start(self) -> Family:
        text = "Time that the start took, by phase"
        gauge = GaugeMetricFamily(Metric.START_SECONDS, text, labels=["model_name", "phase"])
        for phase, seconds in list(phases.seconds.items()):
            gauge.add_metric([self._model, phase], seconds)
        return gauge

    def collect(self) -> Iterator[Family]:
        """The state of caches and queues. Reads single values and copies only."""
        store, follows = self._store, self._follows
        caches = list(store)
        used = sum(each.sequence.kv.reserved_bytes for each in caches)
        kept = sum(each.kv.reserved_bytes for each in store.prefixes)
        limit = store.memory.limit_bytes
        waiting = [cache.job for cache in caches if cache.job is not None and cache.job.queued]
        prefills = sum(isinstance(job, Prefill) for job in waiting)
        running = sum(cache.sequence.finish is None for cache in caches)
        queued = len(waiting) + store.admission.waiting
        carriers = Counts(verifier_pb2.Carrier.Name(each.carrier) for each in self._joined())
        links = {name: carriers[f"CARRIER_{name.upper()}"] for name in ("socket", "stream")}
        queues = {"round": len(waiting) - prefills, "prefill": prefills}
        graphs = {"captured": 0, "failed": 0}
        if self._graphs is not None:
            graphs = {"captured": len(self._graphs), "failed": self._graphs.failed}
        device = str(self._engine.device)
        yield self._target()
        yield self._unused()
        yield self._start()
        for name, text, label, values in (
            (Metric.REQUESTS_RUNNING, "Texts that have a cache and have not ended", "", running),
            (
                Metric.REQUESTS_WAITING,
                "Texts that wait for a step or for KV memory; rising: the verifier is overloaded",
                "",
                queued,
            ),
            (Metric.LEASES, "Caches that clients hold", "", len(caches)),
            (Metric.LEASES_LIMIT, "Maximum number of caches at once", "", store.max_sequences),
            (Metric.FOLLOW_STREAMS, "Drafters that copy KV over gRPC", "", follows.streams),
            (Metric.KV_USED_BYTES, "KV memory of texts that have not ended", "device", used),
            (
                Metric.KV_PREFIX_BYTES,
                "KV memory of ended texts, kept for prompts that begin in the same way",
                "device",
                kept,
            ),
            (Metric.KV_LIMIT_BYTES, "KV memory that may be used (--kv-bytes)", "device", limit),
            (Metric.KV_USAGE, "Share of KV memory that texts use, 0 to 1", "device", used / limit),
            (
                Metric.DRAFT_LINKS,
                "Drafter services that have joined, by socket or gRPC stream",
                "carrier",
                links,
            ),
            (Metric.ENGINE_QUEUE, "Rounds and prefills that wait for a step", "kind", queues),
            (
                Metric.CUDA_GRAPHS,
                "CUDA graphs of steps; batches of one that could not be captured run kernel by "
                "kernel",
                "state",
                graphs,
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name", *filter(None, [label])])
            found = values if isinstance(values, dict) else {device: values}
            for place, value in found.items():
                gauge.add_metric([self._model, *([place] if label else [])], value)
            yield gauge
        for name, text, value in (
            (Metric.LEASES_EXPIRED, "Caches freed since their client disappeared", store.expired),
            (Metric.FOLLOW_UPDATES, "Updates of KV sent to drafters over gRPC", follows.updates),
            (Metric.FOLLOW_BYTES, "Bytes of KV sent to drafters over gRPC", follows.bytes),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
