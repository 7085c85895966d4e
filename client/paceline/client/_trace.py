"""The spans of one generation, where somebody records traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from time import time_ns
from typing import TYPE_CHECKING, Any

from paceline.telemetry.names import PROVIDER, Attribute, Span
from paceline.telemetry.recorder import Note, Recorder, new_span_id
from paceline.telemetry.tracing import fail, traceparent_of, tracer
from paceline.v1 import drafter_pb2, tree_pb2, verifier_pb2

from ._options import GenerationOptions
from ._stats import RoundStats, Stats, Usage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Tracer

_Values = dict[str, Any]


class _Open:
    """A span that has begun: its id, and what its children name as their parent."""

    __slots__ = ("began_ns", "id", "parent", "traceparent")

    def __init__(self, parent: str) -> None:
        self.began_ns = time_ns()
        self.id = new_span_id()
        self.parent = parent
        self.traceparent = f"{parent[:36]}{self.id:016x}-01"


class GenerationTrace:
    """Notes when something begins and ends; spans are made of it while the verifier works.

    So no token waits for its own telemetry but for the time to draw an id.
    """

    def __init__(self, source: Tracer, options: GenerationOptions, address: str) -> None:
        """Begin the generation's span, as a child of the current one. Use `begin`."""
        from opentelemetry import context, trace

        self._call, self._internal = trace.SpanKind.CLIENT, trace.SpanKind.INTERNAL
        attributes = _request(options, address)
        self._root = source.start_span(Span.GENERATION, None, self._call, attributes)
        self._recorder = Recorder(source)
        self._context = trace.set_span_in_context(self._root)
        self._attach = context.attach
        self.traceparent = traceparent_of(self._root)
        """Of the generation."""
        self._parent = self.traceparent
        self._prefill: _Open | None = None
        self._round: _Open | None = None
        self._draft: _Open | None = None
        self._verify: _Open | None = None
        self._tree: drafter_pb2.DraftTree | None = None
        self._drafter: drafter_pb2.DraftAttached | None = None

    @classmethod
    def begin(cls, options: GenerationOptions, address: str) -> GenerationTrace | None:
        """A trace, current in this task from now on; None where nobody records this one."""
        source = tracer()
        if source is None:
            return None
        begun = cls(source, options, address)
        if not begun._root.is_recording():
            return None
        begun._attach(begun._context)
        return begun

    def served_by(self, model: str) -> None:
        """The model's name became known."""
        self._root.update_name(f"{Span.GENERATION} {model}")
        for key in (Attribute.REQUEST_MODEL, Attribute.RESPONSE_MODEL):
            self._root.set_attribute(key, model)

    def begin_prefill(self) -> str:
        """A prompt goes out; the traceparent for it."""
        self._prefill = _Open(self._parent)
        return self._prefill.traceparent

    def end_prefill(self, outcome: verifier_pb2.CacheCreated | Exception) -> None:
        """A cache came, or none."""
        if isinstance(outcome, Exception):
            self._end(Span.PREFILL, self._prefill, dict, outcome)
        else:
            self._end(Span.PREFILL, self._prefill, partial(_prefill, outcome))
        self._prefill = None

    def begin_round(self) -> None:
        """A round begins."""
        self._round = _Open(self.traceparent)
        self._parent = self._round.traceparent
        self._tree = None

    def begin_draft(self) -> str:
        """A tree is asked for; the traceparent for it."""
        self._draft = _Open(self._parent)
        return self._draft.traceparent

    def end_draft(
        self, tree: drafter_pb2.DraftTree | None, drafter: drafter_pb2.DraftAttached
    ) -> None:
        """A tree came; None: it is waited for no longer."""
        self._end(Span.DRAFT, self._draft, partial(_draft, tree, drafter))
        self._tree, self._drafter, self._draft = tree, drafter, None

    def begin_verify(self) -> str:
        """A tree or a free run goes out; the traceparent for it."""
        self._verify = _Open(self._parent)
        return self._verify.traceparent

    def end_round(
        self, index: int, entry: RoundStats, response: verifier_pb2.VerifyResponse
    ) -> None:
        """The last answer of a round came.

        Args:
            index: Of the round, from 1, as in `Chunk.round`.
            entry: What it came to.
            response: Its last answer.
        """
        tree = self._tree if entry.drafted else None
        self._end(Span.VERIFY, self._verify, partial(_verify, entry, response))
        self._end(
            Span.ROUND, self._round, partial(_round, index, entry, response, tree, self._drafter)
        )
        self._verify = self._round = None
        self._parent = self.traceparent

    def settle(self) -> None:
        """Make spans, if there are many to make: nobody waits for this task now."""
        if self._recorder.full:
            self._recorder.flush()

    def finish(
        self, usage: Usage, stats: Stats, finish_reason: str, error: BaseException | None
    ) -> None:
        """The generation is over; `error` says why it failed, if it did."""
        # What a stop string, a cancellation or a failure cut short.
        self._end(Span.PREFILL, self._prefill, dict, error)
        self._end(Span.DRAFT, self._draft, dict, error)
        self._end(Span.VERIFY, self._verify, dict, error)
        self._end(Span.ROUND, self._round, dict, error)
        self._recorder.flush()
        self._root.set_attributes(_response(usage, stats, finish_reason))
        if error is not None:
            fail(self._root, error)
        self._root.end()

    def _end(
        self,
        name: str,
        span: _Open | None,
        attributes: Callable[[], _Values],
        error: BaseException | None = None,
    ) -> None:
        if span is None:
            return
        kind = self._internal if name == Span.ROUND else self._call
        began, ended = span.began_ns, time_ns()
        self._recorder.add(
            Note(name, span.parent, kind, began, ended, attributes, span.id, error, remote=False)
        )


def _request(options: GenerationOptions, address: str) -> Mapping[str, Any]:
    values: _Values = {
        Attribute.OPERATION: Span.GENERATION,
        Attribute.PROVIDER: PROVIDER,
        Attribute.REQUEST_MAX_TOKENS: options.max_new_tokens,
        Attribute.REQUEST_TEMPERATURE: options.temperature,
        Attribute.REQUEST_TOP_P: options.top_p,
        # Seeds have 64 bits without a sign, attributes 64 with one.
        Attribute.REQUEST_SEED: options.seed if options.seed < 1 << 63 else str(options.seed),
    }
    if options.top_k:
        values[Attribute.REQUEST_TOP_K] = options.top_k
    if options.frequency_penalty:
        values[Attribute.REQUEST_FREQUENCY_PENALTY] = options.frequency_penalty
    if options.presence_penalty:
        values[Attribute.REQUEST_PRESENCE_PENALTY] = options.presence_penalty
    if options.drafter is not None:
        values[Attribute.DRAFTER_NAME] = options.drafter
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        values |= {Attribute.SERVER_ADDRESS: host.strip("[]"), Attribute.SERVER_PORT: int(port)}
    elif address:
        values[Attribute.SERVER_ADDRESS] = address
    return values


def _response(usage: Usage, stats: Stats, finish_reason: str) -> _Values:
    values: _Values = {
        Attribute.INPUT_TOKENS: usage.prompt_tokens,
        Attribute.OUTPUT_TOKENS: usage.completion_tokens,
        Attribute.REUSED_TOKENS: usage.reused_tokens,
        Attribute.NUM_DRAFTS: stats.drafted_rounds,
        Attribute.NUM_DRAFT_TOKENS: stats.drafted,
        Attribute.NUM_ACCEPTED: stats.accepted,
    }
    if finish_reason:
        values[Attribute.FINISH_REASONS] = (finish_reason,)
    return values


def _prefill(created: verifier_pb2.CacheCreated) -> _Values:
    return {
        Attribute.QUEUE_US: created.queue_us,
        Attribute.COMPUTE_US: created.prefill_us,
        Attribute.REUSED_TOKENS: created.reused_tokens,
        Attribute.CACHE_GENERATION: created.generation,
    }


def _draft(tree: drafter_pb2.DraftTree | None, drafter: drafter_pb2.DraftAttached) -> _Values:
    if tree is None:
        return {Attribute.DRAFTER_NAME: drafter.drafter}
    return {
        Attribute.DRAFTER_NAME: drafter.drafter,
        Attribute.KV_TRANSPORT: drafter.kv_transport or "none",
        Attribute.KV_BYTES: tree.kv_bytes,
        Attribute.DRAFTER_VERSION: tree.version,
        Attribute.NUM_DRAFT_TOKENS: len(tree.tree.tokens),
        Attribute.QUEUE_US: tree.queue_us,
        Attribute.COMPUTE_US: tree.draft_us,
    }


def _verify(entry: RoundStats, response: verifier_pb2.VerifyResponse) -> _Values:
    return {
        Attribute.NUM_EMITTED: entry.emitted,
        # A free run's answers are many, and a drafter queues for none of them.
        Attribute.QUEUE_US: response.queue_us if entry.drafted else round(entry.queue_ms * 1000),
        Attribute.COMPUTE_US: round(entry.verify_ms * 1000),
        Attribute.BATCH_TOKENS: response.batch_tokens,
    }


def _round(
    index: int,
    entry: RoundStats,
    response: verifier_pb2.VerifyResponse,
    tree: drafter_pb2.DraftTree | None,
    drafter: drafter_pb2.DraftAttached | None,
) -> _Values:
    values: _Values = {
        Attribute.ROUND_INDEX: index,
        Attribute.NUM_DRAFT_TOKENS: entry.drafted,
        Attribute.NUM_ACCEPTED: entry.accepted,
        Attribute.NUM_EMITTED: entry.emitted,
        Attribute.CACHE_GENERATION: response.generation,
    }
    if tree is not None:
        values[Attribute.TREE_DEPTH] = _depth(tree.tree)
        values[Attribute.DRAFTER_VERSION] = tree.version
        values[Attribute.KV_BYTES] = tree.kv_bytes
    if tree is not None and drafter is not None:
        values[Attribute.KV_TRANSPORT] = drafter.kv_transport or "none"
    return values


def _depth(tree: tree_pb2.TokenTree) -> int:
    depths: list[int] = []
    for parent in tree.parents:
        # Not every tree was checked: the verifier may have been restarted in between.
        depths.append(depths[parent] + 1 if 0 <= parent < len(depths) else 1)
    return max(depths, default=0)
