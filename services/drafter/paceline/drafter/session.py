"""A drafter at work on one generation, and what is checked before it may begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.checks import ParameterError
from paceline.drafter.generation import DraftStatistics
from paceline.drafter.kv import KvNotShared
from paceline.drafter.kv.exchange import KvExchange
from paceline.drafter.methods.base import Drafter, GenerationInfo, Update
from paceline.sampling import Sampling
from paceline.service import ServiceError, limits
from paceline.telemetry.names import Attribute, Span
from paceline.telemetry.tracing import annotate, server_span
from paceline.tree import TokenTree, accepted_tokens
from paceline.v1 import exchange_pb2, sampling_pb2

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Tracer

    from paceline.drafter.kv.reader import KvReader, StateReader
    from paceline.drafter.registry import Version


@dataclass(frozen=True)
class Drafted:
    tree: TokenTree
    draft_seconds: float
    queue_seconds: float


class Session:
    """A drafter's sequence for one generation, with the KV and hidden states it reads.

    The event loop may make it; from then on only the drafting thread uses it. The creator has it
    closed once; KV and hidden states are closed after the sequence.

    Under rejection sampling a tree is reduced to its best path.
    """

    def __init__(
        self,
        drafter: Drafter,
        generation: GenerationInfo,
        kv: KvReader | None = None,
        states: StateReader | None = None,
        statistics: DraftStatistics | None = None,
    ) -> None:
        """Start a sequence.

        ``generation`` comes without KV and hidden states: it gets ``kv`` and ``states``, which are
        closed here if the sequence cannot be started. Rounds are added to ``statistics``.
        """
        self.drafter = drafter
        self.statistics = statistics or DraftStatistics()
        self.kv = kv
        self.states = states
        # Whether its verifier works on other cores, so that drafting ahead takes none from it.
        self.apart = False
        self._sources = [source for source in (kv, states) if source is not None]
        self._rejects = generation.sampling.rejects
        self._received = 0
        self._last: Drafted | None = None
        try:
            self.sequence = drafter.start(replace(generation, kv=kv, states=states))
        except BaseException:
            for source in self._sources:
                source.close()
            raise

    @property
    def kv_transport(self) -> str:
        """How it reads the target's KV or hidden states: map or follow; empty: it reads none."""
        return self._sources[0].transport if self._sources else ""

    def take_received_bytes(self) -> int:
        """Return the bytes of KV and hidden states received over gRPC since the last call."""
        before = self._received
        self._received = sum(source.received for source in self._sources)
        return self._received - before

    def lacks_states(self, committed: int) -> bool:
        """Tell whether it follows hidden states, and some below ``committed`` are missing."""
        states = self.states
        return states is not None and states.transport == "follow" and states.committed < committed

    def extend(self, update: Update) -> None:
        """Append emitted tokens, and compare the last tree with them.

        The text does not depend on the tree, so the result is the accepted length even if the
        verifier did not wait for the tree.
        """
        last, self._last = self._last, None
        if last is not None and update.tokens:
            accepted = accepted_tokens(last.tree, update.tokens)
            self.statistics.add(accepted, last.draft_seconds)
        self.sequence.extend(update)

    def finish(self, drafted: Drafted) -> Drafted:
        """Return the tree as it is sent, of a round that was drafted."""
        tree = drafted.tree.best_chain() if self._rejects else drafted.tree
        self._last = replace(drafted, tree=tree)
        return self._last

    def close(self) -> None:
        try:
            self.sequence.close()
        finally:
            for source in self._sources:
                source.close()


async def open_session(
    version: Version,
    generation: GenerationInfo,
    exchange: KvExchange,
    tracer: Tracer | None = None,
    traceparent: str = "",
) -> Session:
    """Open the KV and hidden states that a version reads, and start its sequence. Calls to the
    verifier are children of a span, whose parent is ``traceparent``, unless ``tracer`` is None.
    Raises ``ServiceError``: KV_NOT_SHARED or HIDDEN_STATES_NOT_SHARED."""
    if tracer is None:
        return await _open_session(version, generation, exchange)
    with server_span(tracer, Span.DRAFTER_OPEN, traceparent, version.attributes):
        session = await _open_session(version, generation, exchange)
        annotate({Attribute.KV_TRANSPORT: session.kv_transport or "none"})
    return session


async def _open_session(
    version: Version, generation: GenerationInfo, exchange: KvExchange
) -> Session:
    needs, kv, states = version.drafter.needs, None, None
    verifier = generation.verifier_address, generation.read_grant
    source, reason = "KV", "KV_NOT_SHARED"
    try:
        if needs.kv_layers:
            budget = needs.kv_budget_at(len(generation.tokens))
            kv = await exchange.open(*verifier, needs.kv_layers, needs.kv_options, budget)
        source, reason = "hidden states", "HIDDEN_STATES_NOT_SHARED"
        if needs.hidden_state_layers:
            states = await exchange.open_states(
                *verifier,
                needs.hidden_state_layers,
                needs.hidden_state_window,
                needs.hidden_state_transport,
            )
    except BaseException as error:
        if kv is not None:
            kv.close()
        if not isinstance(error, KvNotShared):
            raise
        raise ServiceError.failed_precondition(
            reason,
            f"drafter {version.spec.name!r} reads the target's {source}, but {error}; use a "
            "drafter that needs tokens only",
        ) from error
    return Session(version.drafter, generation, kv, states, version.statistics)


def check_open(
    message: exchange_pb2.OpenSequence, tokens: Sequence[int], vocab_size: int, max_context: int
) -> None:
    """Check a sequence to open by itself. Raises ``ServiceError``: EMPTY_TEXT, TEXT_TOO_LONG,
    INVALID_PROMPT_LENGTH or NAME_TOO_LONG."""
    if not tokens:
        raise ServiceError.invalid_argument(
            "EMPTY_TEXT", "there are no tokens; send the prompt and the tokens emitted so far"
        )
    _check_length(len(tokens), max_context)
    if message.prompt_length > len(tokens):
        raise ServiceError.invalid_argument(
            "INVALID_PROMPT_LENGTH",
            f"prompt_length is {message.prompt_length}, but there are {len(tokens)} tokens; "
            "send the number of prompt tokens among them",
        )
    for field in ("drafter", "version"):
        if len(getattr(message, field)) > limits.NAME_CHARS:
            raise ServiceError.invalid_argument(
                "NAME_TOO_LONG", f"{field} is longer than {limits.NAME_CHARS} characters"
            )


def check_round(
    message: exchange_pb2.DraftRound,
    length: int,
    vocab_size: int,
    max_context: int,
    version: Version,
) -> None:
    """Check a round.

    ``length`` counts the text with the new tokens. Raises ``ServiceError``:
    TOKEN_OUT_OF_VOCABULARY, OUT_OF_STEP or TEXT_TOO_LONG.
    """
    _check_tokens("new_tokens", message.new_tokens, vocab_size, version)
    if message.total_length != length:
        raise ServiceError.failed_precondition(
            "OUT_OF_STEP",
            f"with its new tokens the text has {length} tokens here, but total_length is "
            f"{message.total_length}; open the sequence again with all tokens",
        )
    _check_length(length, max_context)


def _check_tokens(field: str, tokens: Sequence[int], vocab_size: int, version: Version) -> None:
    """Raise TOKEN_OUT_OF_VOCABULARY unless target and drafter know every token id."""
    limit = min(vocab_size, version.drafter.fit.vocab_size or vocab_size)
    if tokens and max(tokens) >= limit:
        raise ServiceError.invalid_argument(
            "TOKEN_OUT_OF_VOCABULARY",
            f"{field} holds the id {max(tokens)}, expected ids below {limit}",
        )


def _check_length(length: int, max_context: int) -> None:
    """Raise TEXT_TOO_LONG for a text longer than the service's maximum."""
    if length > max_context:
        raise ServiceError.invalid_argument(
            "TEXT_TOO_LONG",
            f"the text has {length} tokens, this drafter service accepts at most {max_context}; "
            "generate without a drafter",
        )


def check_fit(
    target: exchange_pb2.Joined, read_grant: bytes, tokens: Sequence[int], version: Version
) -> None:
    """Check that a drafter fits the target and the text so far.

    The tokenizer's digest decides; the vocabulary size only where a digest is missing, since models
    of one family pad their embeddings differently. Raises ``ServiceError``: TARGET_MISMATCH,
    TOKENIZER_MISMATCH, KV_NOT_SHARED or TOKEN_OUT_OF_VOCABULARY.
    """
    fit, needs, name = version.drafter.fit, version.drafter.needs, version.spec.name
    if fit.target_fingerprint and fit.target_fingerprint != target.target_fingerprint:
        raise ServiceError.failed_precondition(
            "TARGET_MISMATCH",
            f"drafter {name!r} was trained for the target {fit.target_fingerprint}, this one is "
            f"{target.target_fingerprint[:80] or 'unnamed'}; choose a drafter trained for it",
        )
    if fit.tokenizer_digest and target.tokenizer_digest:
        if fit.tokenizer_digest != target.tokenizer_digest:
            raise ServiceError.failed_precondition(
                "TOKENIZER_MISMATCH",
                f"drafter {name!r} has the tokenizer {fit.tokenizer_digest}, the target has "
                f"{target.tokenizer_digest[:80]}; choose a drafter with the target's tokenizer",
            )
    elif fit.vocab_size and fit.vocab_size != target.vocab_size:
        raise ServiceError.failed_precondition(
            "TOKENIZER_MISMATCH",
            f"drafter {name!r} (tokenizer {fit.tokenizer_digest or 'unknown'}) has "
            f"{fit.vocab_size} token ids, the target (tokenizer "
            f"{target.tokenizer_digest[:80] or 'unknown'}) has {target.vocab_size}; "
            "choose a drafter with the target's tokenizer",
        )
    if needs.kv_layers and not read_grant:
        raise ServiceError.failed_precondition(
            "KV_NOT_SHARED",
            f"drafter {name!r} reads the target's KV, but the sequence has no read_grant; choose a "
            "drafter that needs tokens only",
        )
    _check_tokens("tokens", tokens, target.vocab_size, version)


def read_sampling(message: sampling_pb2.SamplingParams, vocab_size: int) -> Sampling:
    """Read and check what the verifier checks too, so that no method fails on it later. Raises
    ``ServiceError``: INVALID_SAMPLING."""
    try:
        sampling = Sampling.from_proto(message)
    except ParameterError as error:
        raise ServiceError.invalid_argument("INVALID_SAMPLING", str(error)) from error
    if max(message.logit_bias, default=0) >= vocab_size:
        raise ServiceError.invalid_argument(
            "INVALID_SAMPLING",
            f"logit_bias names token {max(message.logit_bias)}, expected ids below {vocab_size}",
        )
    return sampling
