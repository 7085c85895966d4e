"""The spans of one generation, where somebody records traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from time import time_ns
from typing import TYPE_CHECKING, Any

from paceline.telemetry.names import PROVIDER, Attribute, Span
from paceline.telemetry.tracing import fail, traceparent_of, tracer
from paceline.v1 import drafter_pb2, tree_pb2, verifier_pb2

from ._options import GenerationOptions
from ._stats import RoundStats, Stats, Usage

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context

_Values = dict[str, Any]


class GenerationTrace:
    """Begins spans when something begins and notes when it ends.

    A span's id must be known before its message goes out. All else about it waits in a list for
    `settle`, which a round calls while the verifier works: so no token waits for its own telemetry.
    """

    def __init__(self, source: trace.Tracer, options: GenerationOptions, address: str) -> None:
        """Begin the generation's span, as a child of the current one. Use `begin`."""
        from opentelemetry import context, trace

        self._clients = trace.SpanKind.CLIENT
        self._under = trace.set_span_in_context
        self._tracer = source
        attributes = _request(options, address)
        self._root = source.start_span(Span.GENERATION, None, self._clients, attributes)
        self._context = self._under(self._root)
        self._parent = self._context
        self._prefill: trace.Span | None = None
        self._round: trace.Span | None = None
        self._draft: trace.Span | None = None
        self._verify: trace.Span | None = None
        self._tree: drafter_pb2.DraftTree | None = None
        self._ended: list[tuple[trace.Span, int, Callable[[], _Values]]] = []
        self._attach = context.attach

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

    @property
    def traceparent(self) -> str:
        """Of the generation."""
        return traceparent_of(self._root)

    def served_by(self, model: str) -> None:
        """The model's name became known."""
        self._root.update_name(f"{Span.GENERATION} {model}")
        for key in (Attribute.REQUEST_MODEL, Attribute.RESPONSE_MODEL):
            self._root.set_attribute(key, model)

    def begin_prefill(self) -> str:
        """A prompt goes out; the traceparent for it."""
        self._prefill = self._start(Span.PREFILL, self._parent)
        return traceparent_of(self._prefill)

    def end_prefill(self, outcome: verifier_pb2.CacheCreated | Exception) -> None:
        """A cache came, or none."""
        span, self._prefill = self._prefill, None
        if span is None:
            return
        if isinstance(outcome, Exception):
            fail(span, outcome)
            span.end()
        else:
            self._end(span, partial(_prefill, outcome))

    def begin_round(self) -> None:
        """A round begins."""
        self._round = self._tracer.start_span(Span.ROUND, self._context)
        self._parent = self._under(self._round)
        self._tree = None

    def begin_draft(self) -> str:
        """A tree is asked for; the traceparent for it."""
        self._draft = self._start(Span.DRAFT, self._parent)
        return traceparent_of(self._draft)

    def end_draft(
        self, tree: drafter_pb2.DraftTree | None, drafter: drafter_pb2.DraftAttached
    ) -> None:
        """A tree came; None: it is waited for no longer."""
        span, self._draft = self._draft, None
        if span is not None:
            self._tree = tree
            self._end(span, partial(_draft, tree, drafter))

    def begin_verify(self) -> str:
        """A tree or a free run goes out; the traceparent for it."""
        self._verify = self._start(Span.VERIFY, self._parent)
        return traceparent_of(self._verify)

    def end_round(
        self, index: int, entry: RoundStats, response: verifier_pb2.VerifyResponse
    ) -> None:
        """The last answer of a round came.

        Args:
            index: Of the round, from 1, as in `Chunk.round`.
            entry: What it came to.
            response: Its last answer.
        """
        if self._verify is not None:
            self._end(self._verify, partial(_verify, entry, response))
        if self._round is not None:
            tree = self._tree if entry.drafted else None
            self._end(self._round, partial(_round, index, entry, response, tree))
        self._verify = self._round = None
        self._parent = self._context

    def settle(self) -> None:
        """Finish what ended since the last call."""
        for span, when, attributes in self._ended:
            span.set_attributes(attributes())
            span.end(when)
        self._ended.clear()

    def finish(
        self, usage: Usage, stats: Stats, finish_reason: str, error: BaseException | None
    ) -> None:
        """The generation is over; `error` says why it failed, if it did."""
        self.settle()
        for span in (self._prefill, self._draft, self._verify, self._round):
            if span is not None:  # what a stop string, a cancellation or a failure cut short
                if error is not None:
                    fail(span, error)
                span.end()
        self._root.set_attributes(_response(usage, stats, finish_reason))
        if error is not None:
            fail(self._root, error)
        self._root.end()

    def _start(self, name: str, parent: Context) -> trace.Span:
        return self._tracer.start_span(name, parent, self._clients)

    def _end(self, span: trace.Span, attributes: Callable[[], _Values]) -> None:
        self._ended.append((span, time_ns(), attributes))


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
    return values


def _depth(tree: tree_pb2.TokenTree) -> int:
    depths: list[int] = []
    for parent in tree.parents:
        # Not every tree was checked: the verifier may have been restarted in between.
        depths.append(depths[parent] + 1 if 0 <= parent < len(depths) else 1)
    return max(depths, default=0)
