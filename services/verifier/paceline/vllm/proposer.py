"""The proposer: what vLLM calls after each step for the chains of the next one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from paceline.service.runtime import log_beside_others
from paceline.telemetry.names import Attribute, Span
from paceline.telemetry.tracing import traceparent_of, tracer
from paceline.tree import EMPTY, MAX_NODES, TokenTree
from paceline.v1 import tree_pb2
from paceline.verifier.engine.drafted import DraftedText, Link
from paceline.verifier.engine.drafting import Drafting
from paceline.verifier.engine.report import (
    Draft,
    DrafterVersion,
    NoDraft,
    StepOutput,
    StepTimes,
    TracedRounds,
)
from paceline.verifier.metrics import RoundMetrics
from paceline.verifier.rpc.exchange import read_tree
from paceline.verifier.scheduler.costs import OUTLIER, flat_table, rising_table
from paceline.verifier.scheduler.scheduler import Scheduler
from paceline.verifier.telemetry import add_round
from paceline.vllm.drafting_lock import DraftingLock
from paceline.vllm.exchange_service import ExchangeService, serve
from paceline.vllm.review import review
from paceline.vllm.settings import TRIED, Settings, vllm_version
from paceline.vllm.texts import RunningTexts, VllmText

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Tracer

_log = logging.getLogger(__name__)

LOOKUP = DrafterVersion("lookup", "", "ngram")  # the drafter of chains that were looked up here

_LATE_SHARE = 0.2  # how much longer than usual a drafter service may take. Unit: steps of vLLM.

# Longest wait for a drafter service, however long it usually takes. Unit: steps of vLLM.
_MAX_WAIT = 2.0

_UNKNOWN_STEP = 0.025  # time of a step before one was measured. Unit: seconds.

_TRACED_ROUNDS = (100, 10)  # the first of a text, and then one in so many

_NEWEST = 0.1  # weight of the newest step in the mean time

# A service reads a prompt once the text has so many tokens, as a share of the prompt's: on cores or
# a GPU that it shares with vLLM this takes time from all texts, and many of them are short.
_READ_SHARE = 0.125

# Steps in which a service is not asked after a late answer; doubled with each one in a row.
_FIRST_REST, _MAX_REST = 8, 512


class PacelineProposer:
    """Chains from drafter services that join, and from look-up, for vLLM's ``custom_class``.

    vLLM's sampler decides each token, so nothing that a drafter sends changes a text more than
    vLLM's own n-gram drafts do. No error in here ends a request: it has no drafts then.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Read vLLM's configuration and the variables ``PACELINE_VLLM_*``, and serve. Raises
        ``TypeError`` if this vLLM has another interface, and ``OptionsError`` if a variable is
        invalid, or the address cannot be served."""
        log_beside_others()
        settings = self._settings = Settings.read(vllm_config)
        model, options = settings.model, settings.options
        self.address = ""  # where drafter services join; empty if they cannot
        self._lock = DraftingLock(self._read_tree)
        self._texts = RunningTexts(model.max_context, lookup=options.lookup == "on")
        self._scheduler = Scheduler(
            rising_table() if settings.on_cpu else flat_table(), MAX_NODES, lockstep=True
        )
        self._always = options.draft == "always"
        self._looks_up = options.lookup == "on"
        self._planned: dict[VllmText, TokenTree] = {}
        self._asked: dict[DraftedText, str] = {}  # for the planned step, and the drafter
        self._disturbed = False  # whether the planned step waited in vain
        self._step_seconds = 0.0
        self._began = perf_counter()
        self._step = 0
        self._rests: dict[Link, tuple[int, int]] = {}  # steps of a rest, and when it ends
        self._metrics: RoundMetrics | None = None
        self._tracer: Tracer | None = None
        if settings.server is not None and settings.leads:
            registry = CollectorRegistry()
            self._metrics = RoundMetrics(registry, model.name)
            service = ExchangeService(
                model,
                self._lock,
                self._tidy,
                partial(review, model.tokenizer_digest),
                path=options.draft_socket,
                needs_token=settings.server.token is not None,
            )
            metered = settings.server.metrics_address is not None
            self.address = serve(
                service, settings.server, registry if metered else None, "paceline-vllm"
            )
            self._tracer = tracer()  # set up by what serves
        version = vllm_version()
        log = _log.info if version in TRIED else _log.warning
        log(
            "paceline drafts for vLLM %s (tried with %s): look-up %s, drafter services join at %s",
            version,
            ", ".join(TRIED),
            options.lookup,
            self.address or "no address, for PACELINE_VLLM_ADDRESS is not set",
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model in vLLM's process."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for the next step.

        Args:
            sampled_token_ids: New tokens of each row of the batch; none: a part of a prompt.
            num_tokens_no_spec: Tokens of each row, the new ones included, int ``[R]``.
            token_ids_cpu: Tokens of the rows, int ``[R, L]``.
            slot_mappings: Not used.

        Returns a chain of each row, empty where drafting does not pay.
        """
        chains: list[list[int]] = [[] for _ in sampled_token_ids]
        if not self._settings.leads:
            return chains
        try:
            with self._lock.held() as drafting:
                for text, chain in self._draft(
                    drafting, sampled_token_ids, num_tokens_no_spec, token_ids_cpu
                ).items():
                    chains[text.row] = list(chain.tokens)
        except Exception:
            _log.exception("no drafts in this step")
            self._planned = {}
        self._began = perf_counter()
        return chains

    def _draft(
        self,
        drafting: Drafting,
        sampled: Sequence[Sequence[int]],
        lengths: NDArray[Any],
        rows: NDArray[Any],
    ) -> dict[VllmText, TokenTree]:
        now = perf_counter()
        self._step += 1
        texts, known = self._texts.follow(sampled, lengths, rows)
        self._learn(texts, known and texts.keys() == self._planned.keys(), now)
        for text in texts:
            if self._tracer is not None and text.span is None:
                self._trace(self._tracer, text)
            self._ask(drafting, text, now)
        drafting.flush(self._step)
        began = perf_counter()
        self._wait(drafting)
        slow = perf_counter() - began > _LATE_SHARE * (self._step_seconds or _UNKNOWN_STEP)
        for text in texts:
            self._choose(text, slow=slow)
        self._planned = self._admit(list(texts))
        return self._planned

    def _learn(self, texts: dict[VllmText, list[int]], alone: bool, now: float) -> None:
        """Learn from the step that ended, which gave the texts these tokens: times only if it had
        the planned texts ``alone``."""
        for text in self._planned.keys() ^ texts.keys():  # new, ended, or preempted by vLLM
            self._scheduler.forget(text.text)
        outputs: list[StepOutput] = []
        for text, chain in self._planned.items():
            if (tokens := texts.get(text)) is None:
                continue
            outputs.append(StepOutput(tokens, range(len(tokens) - 1), checked=len(chain)))
            report = text.report(outputs[-1], StepTimes(self._began, now))
            if self._metrics is not None:
                self._metrics.round(report)
            if text.trace is not None and report.traced and self._tracer is not None:
                add_round(self._tracer, report, text.trace, {})
        if self._step_seconds and now - self._began > OUTLIER * self._step_seconds:
            alone = False  # the machine stood still, whoever drafts
        alone, self._disturbed = alone and not self._disturbed, False
        if alone and outputs:
            weight = _NEWEST if self._step_seconds else 1.0
            self._step_seconds += weight * (now - self._began - self._step_seconds)
        self._scheduler.stepped(self._began, now, outputs if alone else (), self._asked)
        self._asked = {}

    def _ask(self, drafting: Drafting, text: VllmText, now: float) -> None:
        """Look the text up, and request a tree of it where that may be worth more. Either drafts
        only where it has paid."""
        text.looked_up, text.asked_service = EMPTY, False
        text.no_draft = NoDraft.NODE_BUDGET
        if self._looks_up and (nodes := self._budget(text, LOOKUP.name)):
            text.no_draft = NoDraft.EMPTY
            text.looked_up = text.look_up(nodes)
            if text.looked_up:
                self._scheduler.budget_sent(text, nodes)
        if (name := drafting.name_of(text)) is None or not (nodes := self._budget(text, name)):
            return
        if not (self._always or self._scheduler.asks(text, text.looked_up)):
            return
        text.no_draft = NoDraft.EMPTY
        text.timeout, wait = self._times(text)
        text.asked_service = not self._rests_now(text) and drafting.ask(text, nodes, now)
        if text.asked_service:
            drafting.waiting[text] = now + wait
            self._scheduler.budget_sent(text, nodes)
            self._asked[text] = name

    def _budget(self, text: VllmText, drafter: str) -> int:
        """Return how many tokens a drafter may draft for a text; 0: none now."""
        text.drafted_by = drafter
        most = MAX_NODES if self._always else self._scheduler.budget(text)
        nodes = max(0, min(self._settings.tokens, text.text.room - 1, most))
        if not nodes:
            self._scheduler.budget_sent(text, 0)
        return nodes

    def _times(self, text: VllmText) -> tuple[float, float]:
        """Return how long a service may draft, and how long it is waited for: a fifth of a step
        more than it usually takes. A later tree tells how long that is. Unit: seconds."""
        if (timeout := self._settings.options.timeout) is not None:
            return timeout, timeout
        step = self._step_seconds or _UNKNOWN_STEP
        at = text.at_drafter
        usual = (at and at.usual) or 0.0
        return _MAX_WAIT * step, min(usual + _LATE_SHARE * step, _MAX_WAIT * step)

    def _rests_now(self, text: VllmText) -> bool:
        """Return whether its service is not asked for it: it was late, it is reading the prompt, or
        it would have to read it for a text that may end soon."""
        at = text.at_drafter
        if at is None:
            return text.text.output_length < _READ_SHARE * text.text.prompt_length
        return max(self._rests.get(at.link, (0, 0))[1], text.rests_until) > self._step

    def _wait(self, drafting: Drafting) -> None:
        """Wait for the trees, each until its time is over."""
        # The first tree of a text may wait for its prompt to be read: then the text rests alone.
        asked = {
            text: at.link
            for text in drafting.waiting
            if (at := text.at_drafter) is not None and at.round > 1
        }
        while drafting.waiting:
            self._lock.look(max(0.0, min(drafting.waiting.values()) - perf_counter()))
            drafting.expire(perf_counter())
        drafting.ready.clear()
        late = {link for text, link in asked.items() if text.no_draft is NoDraft.LATE}
        for link in set(asked.values()):
            if link not in late:
                self._rests.pop(link, None)
                continue
            rest = min(_MAX_REST, 2 * self._rests.get(link, (_FIRST_REST // 2, 0))[0])
            self._rests[link] = rest, self._step + rest

    def _choose(self, text: VllmText, *, slow: bool) -> None:
        """Take the chain that promises more: the service's, or the one that was looked up. A text
        that was waited for a ``slow`` answer without any token rests."""
        if text.asked_service and text.draft is None and slow:
            text.rest = min(_MAX_REST, max(_FIRST_REST, 2 * text.rest))
            text.rests_until = self._step + text.rest
            # Rests bound what late answers cost. An account that paid for the first ones, which
            # come before it is known how long the service takes, would end its drafts for long.
            self._scheduler.forget(text.text, self._asked.pop(text))
            self._disturbed = True
        elif text.asked_service:
            text.rest = 0
        if text.looked_up and sum(text.looked_up.survivals) > sum(text.tree.survivals):
            text.set_draft(Draft(text.looked_up, LOOKUP))
            text.drafted_by = LOOKUP.name
        elif name := self._asked.get(text):
            text.drafted_by = name

    def _admit(self, texts: list[VllmText]) -> dict[VllmText, TokenTree]:
        """Return the first tokens of each chain, as many as are worth their time."""
        if not texts:
            return {}
        trees = [text.tree for text in texts]
        admitted = self._scheduler.admit(texts, trees, len(texts), sum(map(len, texts)), 0)
        return dict(zip(texts, trees if self._always else admitted, strict=True))

    def _trace(self, tracer: Tracer, text: VllmText) -> None:
        """Begin the span of a text. It has no parent: vLLM gives a proposer no trace context."""
        text.span = tracer.start_span(
            Span.GENERATION, attributes={Attribute.REQUEST_MODEL: self._settings.model.name}
        )
        traceparent = traceparent_of(text.span)
        if text.span.is_recording():
            text.trace = TracedRounds(traceparent, *_TRACED_ROUNDS)

    def _tidy(self, drafting: Drafting) -> None:
        """Close what has ended while vLLM runs no step."""
        for text in self._texts.take_ended(perf_counter()):
            drafting.close(text)
            if text.span is not None:
                text.span.end()
            self._scheduler.forget(text.text)
        for link in self._rests.keys() - set(drafting.links):
            del self._rests[link]
        drafting.flush(self._step)

    def _read_tree(self, message: tree_pb2.TokenTree, text: DraftedText) -> TokenTree:
        """Read and check a tree; its likeliest path is the chain. Raises ``ServiceError``."""
        tree = read_tree(message, self._settings.model, text.text)
        return replace(tree, confidences=tree.acceptance_probabilities).best_chain()
