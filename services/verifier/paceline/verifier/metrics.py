"""Prometheus metrics of a verifier."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from paceline.service.phases import phases
from paceline.telemetry.metrics import Metric, Metrics, Table
from paceline.telemetry.names import PROVIDER, Span
from paceline.v1 import verifier_pb2
from paceline.verifier.engine.engine import Engine
from paceline.verifier.engine.job import Prefill
from paceline.verifier.engine.report import DRAFTER, StepReport, shares
from paceline.verifier.store import Cache, CacheStore, RequestTimes

if TYPE_CHECKING:
    from paceline.cuda.graphs import GraphRunner

_DRAFTER = ("drafter", "version")
_FACTS = {  # label of a fact of the model: its field
    **{name: name for name in ("architecture", "dtype", "weights")},
    "fingerprint": "target_fingerprint",
    "batch_invariant": "batch_invariant",
}

# Number of drafters' versions with series of their own. Those used longest ago are removed.
_MAX_VERSIONS = 64

_STEP_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)

_OF_ROUNDS = Table("model_name")  # the metrics of every engine that drafts
_count = _OF_ROUNDS.counter
_ROUNDS = _count(
    "specdec_rounds",
    "Rounds, by the reason why they have no tree, empty with one; plain steps whose tokens are "
    "sent together are one round",
    *_DRAFTER, "no_draft",
)  # fmt: skip
_DRAFTS = _count("specdec_num_drafts", "Rounds with a tree", *_DRAFTER)
_DRAFTED = _count("specdec_num_draft_tokens", "Tokens of the trees that came in time", *_DRAFTER)
_CHECKED = _count(
    "specdec_num_checked_tokens", "Drafted tokens that the target checked, as scheduled", *_DRAFTER
)
_ACCEPTED = _count(
    "specdec_num_accepted_tokens", "Drafted tokens that equal the target's own choice", *_DRAFTER
)
_ACCEPTED_AT = _count(
    "specdec_num_accepted_tokens_per_pos",
    "Trees whose token at this depth was accepted; the first depth is 0",
    *_DRAFTER, "position",
)  # fmt: skip
_EMITTED = _count("specdec_generation_tokens", "Tokens sent: accepted drafts and the target's own")
_PLAIN = _count("specdec_free_run_tokens", "Tokens emitted by steps without a tree")
_DRAFT_SECONDS = _OF_ROUNDS.histogram(
    "specdec_draft_seconds", "Time from the request of a tree until it came",
    _STEP_SECONDS, *_DRAFTER,
)  # fmt: skip
_LENGTH = _OF_ROUNDS.histogram(
    "specdec_accepted_length_tokens",
    "Tokens emitted by a round with a tree, the target's own one included",
    (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32), *_DRAFTER,
)  # fmt: skip

_OF_STEPS = Table("model_name")
_count, _spread, _gauge = _OF_STEPS.counter, _OF_STEPS.histogram, _OF_STEPS.gauge
_SOURCES = _count(
    "specdec_source_tokens",
    "Drafted tokens by the source that was the first to propose them (a local one, or drafter) and "
    "stage: drafted, checked, accepted",
    "source", "stage",
)  # fmt: skip
_REQUESTS = _count(
    "specdec_requests",
    "Texts that ended: stop, length, or why they ended early, such as released by the client, "
    "cancelled, lease_expired, preempted",
    "finish_reason",
)
_PROMPT = _count("specdec_prompt_tokens", "Tokens of prompts, computed or taken from another cache")
_CACHED = _count(
    "specdec_cached_prompt_tokens", "Prompt tokens whose KV was taken from another cache"
)
_BUSY = _count("specdec_engine_busy_seconds", "Time in which a step ran; its rate is utilisation")
_STEPS = _count("specdec_engine_steps", "Forward passes of the target")
_NODE_BUDGET = _spread(
    "specdec_node_budget_tokens",
    "Drafted tokens that the scheduler asks for after a step; 0: drafting does not pay",
    (0, 1, 2, 4, 8, 16, 32, 64, 128, 255),
)
_SCHEDULE_SECONDS = _spread(
    "specdec_schedule_seconds",
    "Time that the scheduler takes to choose the drafted tokens of a step",
    (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005),
)
_VERIFY_SECONDS = _spread(
    "specdec_verify_seconds", "Time of the step that verifies a tree", _STEP_SECONDS
)
_VERIFY_QUEUE = _spread(
    "specdec_verify_queue_seconds", "Time that a round waits for its step", _STEP_SECONDS
)
_PREFILL_SECONDS = _spread(
    "specdec_prefill_seconds", "Time of all steps of a prompt", _STEP_SECONDS
)
_PREFILL_QUEUE = _spread(
    "specdec_prefill_queue_seconds", "Time that a prompt waits for its first step", _STEP_SECONDS
)
_BATCH_TOKENS = _spread(
    "specdec_engine_batch_tokens", "Tokens of all sequences in one forward pass",
    (2**power for power in range(13)),
)  # fmt: skip
_gauge(
    "specdec_target_info", "1, with facts of the served model", lambda it: {it.facts: 1}, *_FACTS
)
_gauge(
    "specdec_unused_drafters",
    "1: a drafter that texts name or have by default drafts in hardly any step; why",
    lambda it: dict.fromkeys(it.engine.unused_drafters, 1), "drafter", "reason",
)  # fmt: skip
_gauge(
    "specdec_start_seconds", "Time that the start took, by phase",
    lambda _: dict(phases.seconds), "phase",
)  # fmt: skip
_gauge(
    "specdec_num_requests_running", "Texts that have a cache and have not ended",
    lambda it: sum(cache.sequence.finish is None for cache in it.caches()),
)  # fmt: skip
_gauge(
    "specdec_num_requests_waiting",
    "Texts that wait for a step or for KV memory; rising: the verifier is overloaded",
    lambda it: sum(it.waiting().values()) + it.store.admission.waiting,
)
_gauge("specdec_leases", "Caches that clients hold", lambda it: len(it.caches()))
_gauge(
    "specdec_leases_limit", "Maximum number of caches at once", lambda it: it.store.max_sequences
)
_count(
    "specdec_leases_expired", "Caches freed since their client disappeared",
    read=lambda it: it.store.expired,
)  # fmt: skip
_gauge(
    "specdec_kv_cache_used_bytes", "KV memory of texts that have not ended",
    lambda it: it.used_bytes(), "device",
)  # fmt: skip
_gauge(
    "specdec_kv_cache_prefix_bytes",
    "KV memory of ended texts, kept for prompts that begin in the same way",
    lambda it: sum(sequence.kv.reserved_bytes for sequence in it.store.prefixes), "device",
)  # fmt: skip
_gauge(
    "specdec_kv_cache_limit_bytes", "KV memory that may be used (--kv-bytes)",
    lambda it: it.store.memory.limit_bytes, "device",
)  # fmt: skip
_gauge(
    "specdec_kv_cache_usage_ratio", "Share of KV memory that texts use, 0 to 1",
    lambda it: it.used_bytes() / it.store.memory.limit_bytes, "device",
)  # fmt: skip
_gauge(
    "specdec_draft_links", "Drafter services that have joined, by socket or gRPC stream",
    lambda it: it.links(), "carrier",
)  # fmt: skip
_gauge(
    "specdec_engine_queue_length", "Rounds and prefills that wait for a step",
    lambda it: it.waiting(), "kind",
)  # fmt: skip
_gauge(
    "specdec_cuda_graphs",
    "CUDA graphs of steps; batches of one that could not be captured run kernel by kernel",
    lambda it: {
        "captured": 0 if it.graphs is None else len(it.graphs),
        "failed": 0 if it.graphs is None else it.graphs.failed,
    },
    "state",
)

# Those of texts have the buckets of OpenTelemetry's conventions for generative AI; the time per
# token with finer steps at its lower end.
_OF_TEXTS = Table("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_DURATION = _OF_TEXTS.histogram(
    "gen_ai_server_request_duration_seconds", "Time from the request of a text to its last token",
    (0.01 * 2**power for power in range(14)), "error_type",
)  # fmt: skip
_FIRST_TOKEN = _OF_TEXTS.histogram(
    "gen_ai_server_time_to_first_token_seconds",
    "Time from the request of a text to its first token",
    (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
        *(7.5, 10.0),
    ),
)
_PER_TOKEN = _OF_TEXTS.histogram(
    "gen_ai_server_time_per_output_token_seconds",
    "Mean time between two tokens of a text",
    (
        *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4),
        *(0.5, 0.75, 1.0, 2.5),
    ),
)


class RoundMetrics(Metrics):
    """Counters and histograms of rounds, by drafter."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model: str,
        table: Iterable[Metric] = _OF_ROUNDS,
        device: str = "",
    ) -> None:
        """Add the metrics of a table to a registry; ``model`` is the name of the target."""
        self._versions: OrderedDict[tuple[str, str], None] = OrderedDict()
        same = {"model_name": model, "device": device, "gen_ai_request_model": model}
        same |= {"gen_ai_operation_name": Span.GENERATION, "gen_ai_provider_name": PROVIDER}
        super().__init__(registry, table, **same)

    def round(self, report: StepReport) -> None:
        """A round, or consecutive plain ones."""
        emitted, accepted, draft = len(report.output.tokens), len(report.accepted), report.draft
        drafter = self._drafter(report)
        reason = "" if report.no_draft is None else report.no_draft.value
        self.add(_EMITTED, emitted)
        self.add(_ROUNDS, 1, *drafter, reason)
        if draft is None:
            self.add(_PLAIN, emitted)
            return
        self.add(_DRAFTS, 1, *drafter)
        self.add(_DRAFTED, len(draft.tree), *drafter)
        self.add(_CHECKED, report.output.checked, *drafter)
        self.add(_ACCEPTED, accepted, *drafter)
        for position in range(accepted):
            self.add(_ACCEPTED_AT, 1, *drafter, str(position))
        self.add(_LENGTH, emitted, *drafter)
        self.add(_DRAFT_SECONDS, draft.seconds, *drafter)

    def _drafter(self, report: StepReport) -> tuple[str, str]:
        """Return the name and version of a round's drafter; empty without one.

        A drafter service may announce any number of versions, so series of old ones are removed.
        """
        if report.drafter is None:
            return "", ""
        drafter = report.drafter.name, report.drafter.version
        self._versions[drafter] = None
        self._versions.move_to_end(drafter)
        if len(self._versions) > _MAX_VERSIONS:
            oldest, _ = self._versions.popitem(last=False)
            self.remove(dict(zip(_DRAFTER, oldest, strict=True)))
        return drafter


class VerifierMetrics(RoundMetrics):
    """The metrics of one verifier.

    Used on the event loop, except `step`, which the engine thread calls, and what is read by
    `collect`, which runs on the endpoint's thread: single values and copies.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model: verifier_pb2.GetModelResponse,
        store: CacheStore,
        engine: Engine,
        joined: Callable[[], Iterable[verifier_pb2.JoinedService]],
        graphs: GraphRunner | None = None,
    ) -> None:
        """Add the metrics of a verifier to a registry; ``joined`` lists the services that have
        joined, and ``graphs`` are its CUDA graphs."""
        self.store, self.engine, self.graphs = store, engine, graphs
        self._joined = joined
        facts = [getattr(model, field) for field in _FACTS.values()]
        self.facts = tuple(str(f).lower() if isinstance(f, bool) else f for f in facts)
        table = (*_OF_ROUNDS, *_OF_STEPS, *_OF_TEXTS)
        super().__init__(registry, model.name, table, str(engine.device))

    def admitted(self, cache: Cache) -> None:
        """A cache was admitted: its generation begins."""
        cache.request = RequestTimes(perf_counter())

    def prefilled(self, cache: Cache, prefill: Prefill) -> None:
        """A prefill ended. One without a first token is not counted."""
        if prefill.output is None:
            return
        self.add(_PROMPT, cache.sequence.text.prompt_length)
        self.add(_CACHED, prefill.reused)
        self.add(_EMITTED, 1)
        self.add(_PREFILL_SECONDS, prefill.step_us / 1e6)
        self.add(_PREFILL_QUEUE, prefill.queue_us / 1e6)
        request = cache.request
        if request is not None:
            request.emitted(1)
            self.add(_FIRST_TOKEN, request.first - request.began)
            self._finish(cache)

    def answered(self, cache: Cache, report: StepReport) -> None:
        """A step, or consecutive plain ones, were answered."""
        self.round(report)
        for source, *counts in shares(report):
            for stage, count in zip(("drafted", "checked", "accepted"), counts, strict=True):
                self.add(_SOURCES, count, source or DRAFTER, stage)
        self.add(_NODE_BUDGET, report.node_budget)
        self.add(_VERIFY_QUEUE, report.queue_us / 1e6)
        if report.draft is not None:
            self.add(_VERIFY_SECONDS, report.step_us / 1e6)
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
        self.add(_REQUESTS, 1, "cancelled" if reason == "CancelledError" else reason)
        seconds = request.newest - request.began if request.tokens else 0.0
        self.add(_DURATION, seconds, error)
        if request.tokens > 1:
            per_token = (request.newest - request.first) / (request.tokens - 1)
            self.add(_PER_TOKEN, per_token)

    def step(self, seconds: float, tokens: int, decided: float | None) -> None:
        """Count a step of the engine. Called on the engine thread."""
        self.add(_STEPS, 1)
        self.add(_BUSY, seconds)
        self.add(_BATCH_TOKENS, tokens)
        if decided is not None:
            self.add(_SCHEDULE_SECONDS, decided)

    def _finish(self, cache: Cache) -> None:
        if cache.sequence.finish is not None:
            self.released(cache, "")

    def caches(self) -> list[Cache]:
        """Return a copy, since caches come and go while one is read."""
        return list(self.store)

    def used_bytes(self) -> int:
        return sum(cache.sequence.kv.reserved_bytes for cache in self.caches())

    def waiting(self) -> dict[str, int]:
        """Return the number of jobs that wait for a step, by kind."""
        jobs = [cache.job for cache in self.caches() if cache.job is not None and cache.job.queued]
        prefills = sum(isinstance(job, Prefill) for job in jobs)
        return {"round": len(jobs) - prefills, "prefill": prefills}

    def links(self) -> dict[str, int]:
        """Return the number of drafter services that have joined, by carrier."""
        carriers = Counter(verifier_pb2.Carrier.Name(service.carrier) for service in self._joined())
        return {name: carriers[f"CARRIER_{name.upper()}"] for name in ("socket", "stream")}
