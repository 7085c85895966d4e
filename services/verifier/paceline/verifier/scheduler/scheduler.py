"""What a verifier's engine asks before and after each step."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from paceline.verifier.engine.acceptance import Walk
from paceline.verifier.engine.job import Round
from paceline.verifier.engine.sequence import Sequence
from paceline.verifier.engine.tree import UNTOLD, DraftTree
from paceline.verifier.scheduler.admission import Floats, Step, admit
from paceline.verifier.scheduler.costs import CostTable
from paceline.verifier.scheduler.outlook import Outlook, Shared

_NEWEST = 0.1  # weight of the newest step in running means
_AWAY = 0.5  # seconds of silence after which a sequence no longer counts as alive
_STRANGE = 5.0  # a step this many times off its prediction was disturbed: it counts no more


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of the trees of one step.

    Attributes:
        offered: Drafted nodes that were there.
        admitted: Nodes that got a place.
        seconds: Time it took to decide.
    """

    offered: int
    admitted: int
    seconds: float


class Scheduler:
    """Cuts trees to what is worth checking, and tells how large the next ones may be.

    Safety contract: only speed depends on it. Whatever it decides, and whatever confidences it was
    told, the tokens are the same. Belongs to the engine thread.
    """

    def __init__(self, costs: CostTable, most: int) -> None:
        """Make a scheduler.

        Args:
            costs: What steps cost.
            most: Most nodes of a tree.
        """
        self._decision: Decision | None = None
        self._costs = costs
        self._most = most
        self._shared = Shared()
        self._outlooks: dict[Sequence, Outlook] = {}
        self._alive = 0
        # Measured over predicted time of steps, with trees and without: what else the machine does,
        # drafting perhaps, takes its part.
        self._strain = {True: 1.0, False: 1.0}
        self._predicted = self._plain = 0.0
        self._idle = 0.0
        self._ended = 0.0
        # Time in plain steps of all that are alive: it goes slower while steps take longer for all,
        # beside a prompt for instance.
        self._clock = 0.0

    def admit(self, rounds: Items[Round], trees: Items[DraftTree], step: Step) -> list[DraftTree]:
        """Cut the trees of a step that begins now.

        Args:
            rounds: Its rounds, at least one.
            trees: Their trees, likeliest nodes first.
            step: What it is without any of their nodes; the idle time is added here.
        """
        began = perf_counter()
        outlooks = [self._outlook(round_.sequence) for round_ in rounds]
        self._count(outlooks, step, began)
        sizes = [len(tree) - 1 for tree in trees]
        self._decision = None
        if not any(sizes):
            return list(trees)
        own = self._costs.per_sequence * step.emitted
        lost = self._idle / self._strain[True] + own  # whatever the step's size
        drawn = [_drawn(round_) for round_ in rounds]
        admission = admit(
            [
                _told_before(tree.survivals) if causal else tree.survivals
                for tree, causal in zip(trees, drawn, strict=True)
            ],
            [round_.sequence.committed for round_ in rounds],
            Step(step.tokens, step.attended, step.emitted, lost),
            self._costs,
            exponents=[
                1.0 if causal else outlook.trust.exponent
                for outlook, causal in zip(outlooks, drawn, strict=True)
            ],
            causal=any(causal and size for causal, size in zip(drawn, sizes, strict=True)),
        )
        self._predicted = admission.seconds + own
        for outlook, size, count, causal in zip(
            outlooks, sizes, admission.counts, drawn, strict=True
        ):
            if size and not causal:
                outlook.checked(size, count)
        cut = [tree.first(count) for tree, count in zip(trees, admission.counts, strict=True)]
        self._decision = Decision(sum(sizes), sum(admission.counts), perf_counter() - began)
        return cut

    def stepped(self, began: float, ended: float) -> Decision | None:
        """A step ran without an error: of rounds, cut just before, or of pieces of prompts alone.

        Args:
            began: When it began (time.perf_counter).
            ended: When it ended.

        Returns:
            What had been decided; None if there was no tree.
        """
        self._ended = ended
        decision, predicted = self._decision, self._predicted
        self._decision, self._predicted = None, 0.0
        if predicted:
            ratio = (ended - began) / predicted
            if 1 / _STRANGE < ratio < _STRANGE:
                drafted = decision is not None
                self._strain[drafted] += _NEWEST * (ratio - self._strain[drafted])
            self._clock += (ended - began) / (self._plain * self._strain[False])
        return decision

    def answered(self, round_: Round, tree: DraftTree, walk: Walk, ended: float) -> None:
        """A step served a round.

        Args:
            round_: The round.
            tree: What was checked of its tree.
            walk: What came out.
            ended: When the step ended (time.perf_counter).
        """
        outlook = self._outlook(round_.sequence)
        if len(round_.tree) > 1:
            if len(tree) > 1 and not _drawn(round_):
                outlook.trust.learn(tree.survivals, len(walk.path))
                self._shared.trust.learn(tree.survivals, len(walk.path))
            if outlook.answered is not None:
                price = self._clock - outlook.answered
                outlook.drafted(self._alive, len(walk.tokens), price)
        else:
            outlook.ran(len(walk.tokens))
        outlook.answered = self._clock
        outlook.seen = ended if walk.finish is None else 0.0

    def budget(self, sequence: Sequence) -> int:
        """Most nodes to draft next for a sequence; 0: none for now."""
        return self._outlook(sequence).budget(self._alive)

    def forget(self, sequence: Sequence) -> None:
        """A sequence is gone."""
        self._outlooks.pop(sequence, None)

    def _count(self, here: Iterable[Outlook], step: Step, began: float) -> None:
        """Note who is alive, what the step would take without trees, and time lost before it."""
        for outlook in here:
            outlook.seen = began
        self._alive = sum(began - outlook.seen < _AWAY for outlook in self._outlooks.values())
        away = self._alive - step.emitted
        per_sequence = step.attended // step.tokens
        self._predicted = self._costs.step_seconds(step.emitted, step.tokens, step.attended)
        self._plain = self._costs.step_seconds(
            self._alive, step.tokens + away, step.attended + away * per_sequence
        )
        idle = began - self._ended
        if idle < _AWAY:
            self._idle += _NEWEST * (idle - self._idle)
            self._clock += idle / (self._plain * self._strain[False])

    def _outlook(self, sequence: Sequence) -> Outlook:
        found = self._outlooks.get(sequence)
        if found is None:
            found = self._outlooks[sequence] = Outlook(self._shared, self._most)
        return found


def _drawn(round_: Round) -> bool:
    """Whether its drafted tokens are samples that are accepted by chance.

    Then the admission of a node may depend on nothing that was drawn for its position or later,
    now or in an earlier round (appendix A): early stopping, no confidence of the node itself, and
    nothing learnt of what was admitted.
    """
    return round_.sequence.generation.sampling.rejection


def _told_before(survivals: Floats) -> Floats:
    """Survivals of a chain by the confidences of the nodes above each: one of a drafter's own
    probability would tell which token was drawn."""
    above: Floats = np.concatenate(([1.0], survivals[:-1]))[: len(survivals)] * UNTOLD
    return above
