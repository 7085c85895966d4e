"""What a verifier's engine asks before and after each step."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from paceline.tree import DEFAULT_CONFIDENCE, TokenTree
from paceline.verifier.engine.job import Round
from paceline.verifier.engine.sequence import Sequence
from paceline.verifier.scheduler.admission import Floats, Step, admit
from paceline.verifier.scheduler.costs import CostTable
from paceline.verifier.scheduler.experience import Experiences
from paceline.verifier.scheduler.outlook import Outlook
from paceline.verifier.scheduler.plain import PlainSpeed
from paceline.verifier.scheduler.quiet import QuietRun, Served

_NEWEST = 0.1  # weight of the newest step in running means
_AWAY = 0.5  # seconds of silence after which a sequence no longer counts as alive
_STRANGE = 5.0  # a step this many times off its prediction was disturbed: it counts no more
# Sequences that may try at a time what did not pay before, or a quarter of all: one that drafts
# alone disturbs the others as much as several do, and is no measure of what they would gain.
_LEAST_TRIALS = 2
_MOST_LOST = 2.0  # plain steps that one step can take from others by drafting: more is chance


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

    Safety contract: only speed depends on it. Whatever it decides, and whatever confidences and
    names it was told, the tokens are the same. Belongs to the engine thread.
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
        self._experiences = Experiences()
        self._outlooks: dict[Sequence, Outlook] = {}
        self._alive: list[Outlook] = []
        # Of steps without pieces of prompts, and with: the table tells less of those.
        self._plain_speed = (PlainSpeed(), PlainSpeed())
        # Measured over predicted time of steps with trees: what else the machine does.
        self._strain = 1.0
        self._predicted = self._plain = 0.0
        self._prompts = False
        self._idle = 0.0
        self._ended = 0.0
        # Tokens that each sequence alive would have got in plain steps so far.
        self._clock = 0.0
        self._trials: int | None = None
        # While nobody drafts, steps are booked some at a time.
        self._quiet = False
        self._running: tuple[Items[Round], Step, float] | None = None
        self._unbooked: QuietRun | None = None

    def admit(self, rounds: Items[Round], trees: Items[TokenTree], step: Step) -> list[TokenTree]:
        """Cut the trees of a step that begins now.

        Args:
            rounds: Its rounds, at least one.
            trees: Their trees, likeliest nodes first.
            step: What it is without any of their nodes; the idle time is added here.
        """
        began = perf_counter()
        sizes = [len(tree) for tree in trees]
        if self._quiet and not any(sizes):
            self._running = rounds, step, began
            return list(trees)
        self._running = None
        self._book()
        outlooks = self._count(rounds, step, began)
        self._decision = None
        if not any(sizes):
            return list(trees)
        own = self._costs.sequence_seconds(step.emitted, step.attended / step.tokens)
        lost = self._idle / self._strain + own  # whatever the step's size
        drawn, load = [_drawn(round_) for round_ in rounds], len(self._alive)
        admission = admit(
            [
                _told_before(tree.survivals) if causal else tree.survivals
                for tree, causal in zip(trees, drawn, strict=True)
            ],
            [round_.sequence.committed for round_ in rounds],
            Step(step.tokens, step.attended, step.emitted, lost),
            self._costs,
            exponents=[
                # What is told counts where nothing is learnt, and where one wants to find out.
                1.0 if causal or not outlook.pays(load) else outlook.trust.exponent
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

    def stepped(self, began: float, ended: float, served: Items[Served] = ()) -> Decision | None:
        """A step ran without an error: of rounds, cut just before, or of pieces of prompts alone.

        Args:
            began: When it began (time.perf_counter).
            ended: When it ended.
            served: What came of its rounds.

        Returns:
            What had been decided; None if there was no tree.
        """
        if self._running is not None:
            rounds, step, asked = self._running
            self._running = None
            if self._unbooked is None or not self._unbooked.goes_on(rounds, step, ended):
                self._book()
                self._unbooked = QuietRun(rounds, step, asked, began)
            self._unbooked.add(ended, served)
            if self._unbooked.full:
                self._book()
            return None
        self._book()
        return self._learn(began, ended, served)

    def _book(self) -> None:
        """Take in the quiet steps that have run since this was done last."""
        run, self._unbooked = self._unbooked, None
        if run is not None:
            self._count(run.rounds, run.step, run.asked)
            self._learn(run.began, run.ended, run.served(), steps=len(run))

    def _learn(
        self, began: float, ended: float, served: Items[Served], *, steps: int = 1
    ) -> Decision | None:
        decision, plain = self._decision, self._plain
        idle = began - self._ended
        self._decision, self._plain, self._ended = None, 0.0, ended
        if not plain:
            return None
        if decision is not None:
            ratio = (ended - began) / self._predicted
            if 1 / _STRANGE < ratio < _STRANGE:
                self._strain += _NEWEST * (ratio - self._strain)
        passed = ended - began + (idle if idle < _AWAY else 0.0)
        self._account(passed / plain, served, steps, drafted=decision is not None)
        for each in served:
            self._answered(each, ended)
        self._quiet = not any(each.open or each.drafting for each in self._alive)
        return decision

    def budget(self, sequence: Sequence) -> int:
        """Most nodes to draft next for a sequence; 0: none for now."""
        outlook = self._outlook(sequence)
        if outlook.budget is None or self._unbooked is None:
            outlook.budget = outlook.nodes if self._may_draft(outlook) else 0
        return outlook.budget

    def told(self, sequence: Sequence, budget: int) -> None:
        """A client was answered, with this budget: its next round is to come."""
        self._book()
        outlook = self._outlook(sequence)
        outlook.told(max(1, len(self._alive)), budget, self._clock)
        self._quiet &= not outlook.open
        self._trials = None
        outlook.seen = self._ended

    def rests(self, sequence: Sequence) -> bool:
        """Whether its client would draft, but was told not to."""
        outlook = self._outlook(sequence)
        return outlook.drafts and not outlook.open

    def forget(self, sequence: Sequence) -> None:
        """A sequence is gone."""
        self._running = None  # of a step that failed
        self._book()
        outlook = self._outlooks.pop(sequence, None)
        if outlook is not None:
            outlook.ended()

    def _may_draft(self, outlook: Outlook) -> bool:
        load = max(1, len(self._alive))
        if not outlook.drafts:
            return True  # nobody drafts, or this is how it comes to light
        if not self._plain_speed[False].known(load):
            return False
        account = outlook.experience.account(load)
        if account.balance <= 0:
            return False
        if outlook.pays(load) or outlook.waits:
            return True
        if not (account.trying and outlook.probe_due):
            return False
        if self._trials is None:
            self._trials = sum(each.open and not each.pays(load) for each in self._alive)
        return self._trials < max(_LEAST_TRIALS, load // 4)

    def _account(self, time: float, served: Items[Served], steps: int, *, drafted: bool) -> None:
        """Let time pass, and find out what drafting takes from those who do not draft.

        Args:
            time: That of a step, or of some that are booked together, over that of one plain step
                of all who are alive by the table.
            served: What came of it at its end.
            steps: How many they are.
            drafted: Whether it held trees.
        """
        load = len(self._alive)
        drafting = [outlook for outlook in self._alive if outlook.drafting]
        speed = self._plain_speed[self._prompts]
        if not (drafted or drafting):
            speed.quiet(load, sum(len(each.output.tokens) for each in served), time, steps)
        tick = time * speed.rate(load)
        self._clock += tick
        self._experiences.passed(load, tick)
        if not drafting:
            return
        speed.disturbed(load)
        others = load - len(drafting)
        got = sum(
            len(each.output.tokens)
            for each in served
            if not self._outlooks[each.round.sequence].drafting
        )
        lost = min(tick * others - got, _MOST_LOST * others)
        for outlook in drafting:
            outlook.toll += lost / len(drafting)

    def _answered(self, served: Served, ended: float) -> None:
        outlook = self._outlook(served.round.sequence)
        tree = len(served.round.tree) > 0
        if len(served.tree) > 0 and not _drawn(served.round):
            for trust in (outlook.trust, outlook.experience.trust):
                trust.learn(served.tree.survivals, len(served.output.accepted))
        emitted = len(served.output.tokens)
        outlook.answered(len(self._alive), emitted, self._clock, tree=tree)
        outlook.seen = ended if served.output.finish is None else 0.0

    def _count(self, rounds: Items[Round], step: Step, began: float) -> list[Outlook]:
        """Note who is alive, what the step would take without trees, and time lost before it.

        Returns:
            Outlooks of the rounds.
        """
        here = [self._outlook(round_.sequence) for round_ in rounds]
        for outlook in here:
            outlook.seen = began
        alive = [each for each in self._outlooks.values() if began - each.seen < _AWAY]
        self._alive, self._trials = alive, None
        away = len(alive) - step.emitted
        per_sequence = step.attended // step.tokens
        self._prompts = step.tokens > step.emitted
        self._plain = self._costs.step_seconds(
            len(alive), step.tokens + away, step.attended + away * per_sequence
        )
        idle = began - self._ended
        if idle < _AWAY:
            self._idle += _NEWEST * (idle - self._idle)
        return here

    def _outlook(self, sequence: Sequence) -> Outlook:
        found = self._outlooks.get(sequence)
        if found is None:
            name = sequence.drafter
            experience = self._experiences.of(name or "")
            found = Outlook(experience, self._most, drafts=name is not None)
            self._outlooks[sequence] = found
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
    above: Floats = np.concatenate(([1.0], survivals[:-1]))[: len(survivals)] * DEFAULT_CONFIDENCE
    return above
