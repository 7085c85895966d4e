"""Spans of a generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.telemetry.names import PROVIDER, Attribute, Span
from paceline.telemetry.tracing import fail, traceparent_of, tracer
from paceline.v1 import drafter_pb2, tree_pb2, verifier_pb2

from ._options import GenerationOptions
from ._stats import RoundStats, Stats, Usage

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import Tracer

_Values = Mapping[str, Any]


class GenerationTrace:
    """The spans of a generation, and of its prefills, rounds, drafts and verifications.

    A span that begins during a round is a child of the round, any other one of the generation.
    """

    def __init__(self, source: Tracer, root: trace.Span) -> None:
        """Use `start`."""
        self._tracer = source
        self._root = root
        self._open: dict[str, trace.Span] = {}
        self._tree: drafter_pb2.DraftTree | None = None
        self._drafter = drafter_pb2.DraftAttached()
        self.traceparent = traceparent_of(root)
        """Trace context of the generation."""

    @classmethod
    def start(cls, options: GenerationOptions) -> GenerationTrace | None:
        """Starts the span of the generation as a child of the current one.

        The span becomes the current one of this task. Returns None if it is not recorded.
        """
        source = tracer()
        if source is None:
            return None
        from opentelemetry import context, trace

        kind = trace.SpanKind.CLIENT
        root = source.start_span(Span.GENERATION, None, kind, _request(options))
        if not root.is_recording():
            return None
        context.attach(trace.set_span_in_context(root))
        return cls(source, root)

    def served_by(self, model: str) -> None:
        """Sets the name of the model."""
        self._root.update_name(f"{Span.GENERATION} {model}")
        self._root.set_attributes({Attribute.REQUEST_MODEL: model, Attribute.RESPONSE_MODEL: model})

    def placed(self, address: str) -> None:
        """Sets the verifier's address, of the generation and of its prefill in progress."""
        values = _server(address)
        self._root.set_attributes(values)
        if Span.PREFILL in self._open:
            self._open[Span.PREFILL].set_attributes(values)

    def begin(self, name: str) -> str:
        """Starts a span, one of `names.Span`; returns the traceparent for the services."""
        from opentelemetry import trace

        parent = trace.set_span_in_context(self._open.get(Span.ROUND, self._root))
        kind = trace.SpanKind.INTERNAL if name == Span.ROUND else trace.SpanKind.CLIENT
        span = self._open[name] = self._tracer.start_span(name, parent, kind)
        return traceparent_of(span)

    def end_prefill(self, outcome: verifier_pb2.CacheCreated | Exception) -> None:
        """Ends the prefill's span with the created cache or an error."""
        if isinstance(outcome, Exception):
            self._end(Span.PREFILL, {}, outcome)
            return
        self._end(
            Span.PREFILL,
            {
                Attribute.QUEUE_US: outcome.queue_us,
                Attribute.COMPUTE_US: outcome.prefill_us,
                Attribute.REUSED_TOKENS: outcome.reused_tokens,
                Attribute.CACHE_GENERATION: outcome.generation,
            },
        )

    def end_draft(
        self, tree: drafter_pb2.DraftTree | None, drafter: drafter_pb2.DraftAttached
    ) -> None:
        """Ends the draft's span; `tree` is None after a timeout or failure."""
        self._tree, self._drafter = tree, drafter
        values: dict[str, Any] = {Attribute.DRAFTER_NAME: drafter.drafter}
        if tree is not None:
            values |= {
                Attribute.KV_TRANSPORT: drafter.kv_transport or "none",
                Attribute.KV_BYTES: tree.kv_bytes,
                Attribute.DRAFTER_VERSION: tree.version,
                Attribute.NUM_DRAFT_TOKENS: len(tree.tree.tokens),
                Attribute.QUEUE_US: tree.queue_us,
                Attribute.COMPUTE_US: tree.draft_us,
            }
        self._end(Span.DRAFT, values)

    def end_round(
        self, index: int, entry: RoundStats, response: verifier_pb2.VerifyResponse
    ) -> None:
        """Ends the spans of a round and its verification.

        Args:
            index: Index of the round, from 1, as in `Chunk.round`.
            entry: Statistics of the round.
            response: Last response of the round.
        """
        self._end(
            Span.VERIFY,
            {
                Attribute.NUM_EMITTED: entry.emitted,
                # A free run has many responses and no drafter: all queueing is the verifier's.
                Attribute.QUEUE_US: (
                    response.queue_us if entry.drafted else round(entry.queue_ms * 1000)
                ),
                Attribute.COMPUTE_US: round(entry.verify_ms * 1000),
                Attribute.BATCH_TOKENS: response.batch_tokens,
            },
        )
        values: dict[str, Any] = {
            Attribute.ROUND_INDEX: index,
            Attribute.NUM_DRAFT_TOKENS: entry.drafted,
            Attribute.NUM_ACCEPTED: entry.accepted,
            Attribute.NUM_EMITTED: entry.emitted,
            Attribute.CACHE_GENERATION: response.generation,
        }
        if entry.drafted and self._tree is not None:
            values |= {
                Attribute.TREE_DEPTH: _depth(self._tree.tree),
                Attribute.DRAFTER_VERSION: self._tree.version,
                Attribute.KV_BYTES: self._tree.kv_bytes,
                Attribute.KV_TRANSPORT: self._drafter.kv_transport or "none",
            }
        self._end(Span.ROUND, values)

    def finish(
        self, usage: Usage, stats: Stats, finish_reason: str, error: BaseException | None
    ) -> None:
        """Ends all spans; `error` is the exception of a failed generation."""
        # Spans that a stop string, a cancellation or a failure interrupted; the round's last.
        for name in reversed(self._open.copy()):
            self._end(name, {}, error)
        self._root.set_attributes(
            {
                Attribute.INPUT_TOKENS: usage.prompt_tokens,
                Attribute.OUTPUT_TOKENS: usage.completion_tokens,
                Attribute.REUSED_TOKENS: usage.reused_tokens,
                Attribute.NUM_DRAFTS: stats.drafted_rounds,
                Attribute.NUM_DRAFT_TOKENS: stats.drafted,
                Attribute.NUM_ACCEPTED: stats.accepted,
            }
        )
        if finish_reason:
            self._root.set_attribute(Attribute.FINISH_REASONS, (finish_reason,))
        if error is not None:
            fail(self._root, error)
        self._root.end()

    def _end(self, name: str, values: _Values, error: BaseException | None = None) -> None:
        span = self._open.pop(name, None)
        if span is None:
            return
        span.set_attributes(values)
        if error is not None:
            fail(span, error)
        span.end()


def _request(options: GenerationOptions) -> _Values:
    values: dict[str, Any] = {
        Attribute.OPERATION: Span.GENERATION,
        Attribute.PROVIDER: PROVIDER,
        Attribute.REQUEST_MAX_TOKENS: options.max_new_tokens,
        Attribute.REQUEST_TEMPERATURE: options.temperature,
        Attribute.REQUEST_TOP_P: options.top_p,
        # Seeds are unsigned, attributes signed integers of 64 bits.
        Attribute.REQUEST_SEED: options.seed if options.seed < 1 << 63 else str(options.seed),
    }
    optional = {
        Attribute.REQUEST_TOP_K: options.top_k,
        Attribute.REQUEST_FREQUENCY_PENALTY: options.frequency_penalty,
        Attribute.REQUEST_PRESENCE_PENALTY: options.presence_penalty,
    }
    values |= {key: value for key, value in optional.items() if value}
    if options.drafter is not None:
        values[Attribute.DRAFTER_NAME] = options.drafter
    return values


def _server(address: str) -> _Values:
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        return {Attribute.SERVER_ADDRESS: host.strip("[]"), Attribute.SERVER_PORT: int(port)}
    return {Attribute.SERVER_ADDRESS: address} if address else {}


def _depth(tree: tree_pb2.TokenTree) -> int:
    depths: list[int] = []
    for parent in tree.parents:
        # A verifier that was restarted in this round did not validate the tree.
        depths.append(depths[parent] + 1 if 0 <= parent < len(depths) else 1)
    return max(depths, default=0)
