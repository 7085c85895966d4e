"""Texts that are drafted for, their trees, and the drafter services where they are open."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paceline.service import ServiceError, limits
from paceline.service.exchange import FramedSocket
from paceline.text import Text
from paceline.tree import EMPTY, TokenTree, merge
from paceline.v1 import drafter_pb2, exchange_pb2
from paceline.verifier.engine.report import (
    LOCAL,
    Draft,
    DraftCall,
    DrafterVersion,
    NoDraft,
    StepOutput,
    StepReport,
    StepTimes,
    TracedRounds,
    microseconds,
)

if TYPE_CHECKING:
    from paceline.verifier.engine.local import LocalGuesses
    from paceline.verifier.grammar import Guide

# Maximum confidence that is used. Calibration raises survivals to a power, which keeps 1 at 1.
_MAX_CONFIDENCE = 0.98


class DraftedText:
    """A text that drafters and local sources draft for, and the tree of its next step.

    Only the thread that runs its steps uses it.
    """

    def __init__(
        self,
        text: Text,
        *,
        drafter: str | None = None,
        always_draft: bool = False,
        max_nodes: int = 0,
        timeout: float | None = None,
        isolated: bool = False,
        trace: TracedRounds | None = None,
    ) -> None:
        """Begin without a tree. ``drafter``: NAME or NAME@VERSION; empty: the default one;
        ``local``: the verifier's own guesses alone; None: none. ``always_draft``: before every
        step, whatever the scheduler says; ``max_nodes``: of a tree, 0 for no limit of its own;
        ``timeout``: seconds after which a step goes on without its tree, None: by the drafter's
        mean time; ``isolated``: the drafter uses no other texts for it, nor it for others;
        ``trace``: its rounds that have spans."""
        self.text = text
        self.drafter = drafter
        self.always_draft = always_draft
        self.max_nodes = max_nodes
        self.timeout = timeout
        self.isolated = isolated
        self.trace = trace
        self.drafted_by: str | None = None  # name of the drafter now; None if none did yet
        self.draft: Draft | None = None  # the tree that was drafted for the next step
        self.tree = EMPTY  # its nodes to verify, likeliest first, all of which may be emitted
        self.nodes: tuple[int, ...] = ()  # index in the drafted tree of each node of `tree`
        self.no_draft = NoDraft.NO_DRAFTER  # why there is no tree
        self.local: LocalGuesses | None = None  # the verifier's own guesses; None if it makes none
        self.guess = EMPTY  # the local tree, which a drafter's tree is merged with
        self.at_drafter: SequenceAtDrafter | None = None  # None if it is open at no service
        self.call: DraftCall | None = None  # the request of a tree, in a traced round
        self.retry_at = 0.0  # when it may be opened at a drafter again after a failure
        self.failures = 0  # failures of drafting since the last tree
        self.fallbacks: list[tuple[str, str]] = []  # those not reported yet: reason and message
        self.round_began = perf_counter()  # when the step before ended

    @property
    def guide(self) -> Guide | None:
        """The place of the text in its grammar; None if it has none."""
        return None

    @property
    def read_grant(self) -> bytes:
        """Lets drafters read committed KV; empty if there is none."""
        return b""

    @property
    def committed(self) -> int:
        """Positions whose KV drafters may read. Unit: tokens."""
        return 0

    def set_draft(self, draft: Draft) -> None:
        """Take the tree for the next step, without nodes that the grammar refuses."""
        self.draft = draft
        self.tree, self.nodes = rank(draft.tree, self.text.room - 1)
        if (guide := self.guide) is not None:
            with guide.turn() as ready:
                accepted = guide.accepted_nodes(self.tree) if ready else []
            if len(accepted) < len(self.tree):
                self.tree = self.tree.subtree(accepted)
                self.nodes = tuple(self.nodes[node] for node in accepted)

    @property
    def asked(self) -> bool:
        """Whether a drafter service made the tree of the next step, or a part of it."""
        return self.draft is not None and self.draft.drafter != LOCAL

    def use_guess(self) -> None:
        """Verify the local tree, if there is no other."""
        if self.draft is None and len(self.guess):
            self.set_draft(Draft(self.guess, LOCAL))

    def merge_guess(self, tree: TokenTree, nodes: int) -> TokenTree:
        """Return a drafter's tree, and the local one, as one tree of at most so many nodes."""
        if not len(tree) or tree.proposals or not len(self.guess):
            return tree
        return merge(self.guess, tree, nodes=nodes, depth=self.text.room - 1)

    def report(
        self, output: StepOutput, step: StepTimes, *, queue_us: int = 0, node_budget: int = 0
    ) -> StepReport:
        """Report a step whose tokens the text has, and begin the next round without a tree."""
        traced = self.trace is not None and self.trace.traced
        report = StepReport(
            output,
            position=self.text.output_length - len(output.tokens),
            committed=len(self.text) - 1,
            accepted=[self.nodes[node] for node in output.accepted],
            sources=self.tree.sources[: output.checked],
            draft=self.draft,
            no_draft=None if self.draft is not None else self.no_draft,
            drafter=self._drafter,
            fallbacks=self.fallbacks,
            call=self.call,
            traced=traced,
            batch_tokens=step.tokens,
            queue_us=queue_us,
            step_us=microseconds(step.ended - step.began),
            plain_us=step.plain_us,
            node_budget=node_budget,
            round_began=self.round_began,
            began=step.began,
            ended=step.ended,
        )
        if self.trace is not None:
            self.trace.rounds += 1
        self.draft, self.tree, self.nodes, self.guess = None, EMPTY, (), EMPTY
        self.call, self.fallbacks, self.round_began = None, [], step.ended
        return report

    @property
    def _drafter(self) -> DrafterVersion | None:
        """The drafter of the round, whether it has drafted or not."""
        if self.draft is not None:
            return self.draft.drafter
        if self.at_drafter is not None:
            return self.at_drafter.drafter
        return LOCAL if self.local is not None and self.no_draft is NoDraft.EMPTY else None


def rank(tree: TokenTree, max_depth: int) -> tuple[TokenTree, tuple[int, ...]]:
    """Sort a tree by survival, without nodes below ``max_depth``. Returns it with a confidence for
    each node, and the index in ``tree`` of each node."""
    if not len(tree):
        return tree, ()
    confidences = tree.acceptance_probabilities
    if not tree.confidences or max(confidences) > _MAX_CONFIDENCE:
        confidences = tuple(min(confidence, _MAX_CONFIDENCE) for confidence in confidences)
        tree = TokenTree(tree.tokens, tree.parents, confidences, tree.proposals, tree.sources)
    if tree.is_chain:  # survival falls along it
        tree = tree.first(max_depth)
        return tree, tuple(range(len(tree)))
    order = sorted(range(len(tree)), key=tree.survivals.__getitem__, reverse=True)  # stable
    if tree.depth > max_depth:
        order = [node for node in order if tree.depths[node] <= max_depth]
    if order == list(range(len(tree))):
        return tree, tuple(order)
    return tree.subtree(order), tuple(order)


@dataclass(eq=False)
class Link:
    """The connection to one drafter service.

    The event loop makes it and hands it to :meth:`Drafting.join`; the engine thread uses it from
    then on. Any thread may read ``drafters``, which is replaced as a whole, ``carrier`` and the
    number of ``sequences``.
    """

    drafters: exchange_pb2.DrafterList  # what the service announced last
    # Sends a message over the gRPC stream. Called on the engine thread.
    write: Callable[[exchange_pb2.JoinResponse], None]
    # Ends the Join call with an error. Called on the engine thread.
    end: Callable[[ServiceError], None]
    # Its Unix socket; None: its messages travel over the gRPC stream.
    socket: FramedSocket | None = None
    # Open sequences by number.
    sequences: dict[int, SequenceAtDrafter] = field(default_factory=dict)
    last: int = 0  # the newest number that was given out
    # Answers that may still come for sequences that were closed before they were on their way.
    late: int = 0
    # What is sent next.
    message: exchange_pb2.JoinResponse = field(default_factory=exchange_pb2.JoinResponse)
    # Mean latency of trees by version. Unit: seconds.
    latency: dict[DrafterVersion, float] = field(default_factory=dict)
    # Trees and answers that were wrong, late or never came since the last tree that was taken. Of
    # several services that offer a drafter the one with the fewest gets a sequence.
    failures: int = 0
    joined: bool = False  # whether the engine uses it
    # Whether it is of a user who may join: by a token, or by the user of the socket.
    known: bool = True

    @property
    def carrier(self) -> str:
        """How its messages travel: socket or stream."""
        return "stream" if self.socket is None else "socket"

    def offers(self, name: str, version: str) -> bool:
        """Tell whether a drafter takes a new sequence; without a version, any of its name."""
        return any(
            info.name == name and version in ("", info.version) and not info.draining
            for info in self.drafters.drafters
        )

    def version(self, name: str, version: str) -> DrafterVersion:
        """Return a version, with the method that was announced for it; without one, no method."""
        drafters, size = self.drafters.drafters, limits.NAME_CHARS
        methods = (info.method for info in drafters if (info.name, info.version) == (name, version))
        return DrafterVersion(name, version[:size], next(methods, "")[:size])

    def preference(self) -> tuple[int, bool, int]:
        """The lowest of several services that offer a drafter gets a sequence."""
        return self.failures, self.socket is None, len(self.sequences)

    def forget(self, number: int) -> None:
        """A sequence is open no more. What the service has sent meanwhile is at most that it was
        opened, a tree, and that it is refused."""
        del self.sequences[number]
        self.late = min(self.late + 3, limits.LATE_ANSWERS)

    def close(self, number: int) -> None:
        """Have the service close a sequence. One whose opening was not sent is not sent at all."""
        message = self.message
        _remove(message.rounds, number)
        if not _remove(message.open, number):
            message.closed.append(number)

    def send(self, message: exchange_pb2.JoinResponse) -> None:
        """Send a message without a wait. Raises ``PeerGone`` if the socket is closed, or the peer
        does not read."""
        if self.socket is None:
            self.write(message)
        else:
            self.socket.send(message.SerializeToString())


def _remove(parts: Any, number: int) -> bool:
    """Remove the parts of a message that are of a sequence; returns whether there were any."""
    indices = [index for index, part in enumerate(parts) if part.sequence == number]
    for index in reversed(indices):
        del parts[index]
    return bool(indices)


@dataclass(slots=True, eq=False)
class SequenceAtDrafter:
    """A generation that is open at a drafter service."""

    link: Link  # the service
    number: int  # its number there
    job: DraftedText  # the generation
    name: str  # name of the drafter
    sent: int  # tokens of the text that were sent
    asked_at: float  # when its tree, or the sequence, was requested (time.perf_counter)
    # What the service answered; None if it has not answered.
    opened: exchange_pb2.SequenceOpened | None = None
    # The version that drafts; None: the service has not answered.
    drafter: DrafterVersion | None = None
    round: int = 0  # number of the newest round
    pending: bool = False  # whether its tree has not come
    budget: int = 0  # nodes that were requested at most
    traceparent: str = ""  # of the span of its newest round; empty if that is not traced

    @property
    def usual(self) -> float | None:
        """Mean latency of its version's trees; None if none has come. Unit: seconds."""
        return None if self.drafter is None else self.link.latency.get(self.drafter)


def eligible(
    links: Iterable[exchange_pb2.DrafterList], drafter: str
) -> list[drafter_pb2.DrafterInfo]:
    """Return all versions of a drafter that a generation may be given, by the drafters of each
    service that has joined and NAME, NAME@VERSION, or nothing for the default."""
    lists = list(links)
    name, _, version = drafter.partition("@")
    if not drafter:
        lists = [listed for listed in lists if listed.default_drafter][:1]
        name = lists[0].default_drafter if lists else ""
    return [
        info
        for listed in lists
        for info in listed.drafters
        if info.name == name and (info.version == version if version else info.traffic_share > 0)
    ]


def hidden_states(
    links: Iterable[exchange_pb2.DrafterList], drafter: str
) -> tuple[tuple[int, ...], int]:
    """Return hidden states that a drafter reads, over all its versions that are :func:`eligible`:
    layers, counted from 0 and rising, and the number of newest positions; 0: all."""
    reading = [info for info in eligible(links, drafter) if info.hidden_state_layers]
    windows = [info.hidden_state_window for info in reading]
    layers = {layer for info in reading for layer in info.hidden_state_layers}
    return tuple(sorted(layers)), max(windows) if windows and all(windows) else 0
