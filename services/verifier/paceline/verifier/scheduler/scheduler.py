"""What the engine calls before and after each step: which nodes to check, and who may draft."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.tree import DEFAULT_CONFIDENCE, TokenTree
from paceline.verifier.scheduler.admission import Floats, Step, admit
from paceline.verifier.scheduler.controller import Drafters, PlainClock, SequenceState
from paceline.verifier.scheduler.costs import CostTable, LiveCosts

if TYPE_CHECKING:
    from paceline.verifier.engine.job import Decode
    from paceline.verifier.engine.output import StepOutput
    from paceline.verifier.engine.sequence import Sequence

_NEWEST = 0.1  # weight of the newest step in the mean idle time
_AWAY = 5.0  # seconds after which a sequence that was to draft counts as paused


@dataclass(frozen=True, slots=True)
class Served:
    """A generation that a step served: what was checked of its tree, and the result."""

    job: Decode
    tree: TokenTree
    output: StepOutput


@dataclass(frozen=True, slots=True)
class _Plan:
    """The step that runs.

    Attributes:
        jobs: Its generations.
        plain_seconds: Predicted time of that step. Unit: seconds.
        prompts: Whether it holds pieces of prompts.
        plain: Whether no sequence drafts.
        tokens: Batch tokens, checked nodes included.
        attended: KV tokens that they attend to, summed over them.
        decided: Time it took to decide on its trees; None: it has none. Unit: seconds.
    """

    jobs: Items[Decode]
    plain_seconds: float
    prompts: bool
    plain: bool
    tokens: int
    attended: float
    decided: float | None


class Scheduler:
    """Cuts trees to the nodes worth checking (admission), and sets node budgets (controller).

    Safety contract: it changes speed only. Whatever it decides, the tokens are the same. Only the
    engine thread uses it.
    """

    def __init__(self, costs: CostTable, most_nodes: int) -> None:
        """Make a scheduler.

        Args:
            costs: Step times as profiled; corrected as steps run.
            most_nodes: Largest node budget.
        """
        self._costs = LiveCosts(costs)
        self._most_nodes = most_nodes
        self._clock = PlainClock()
        self._drafters = Drafters()
        self._states: dict[Sequence, SequenceState] = {}
        self._plan: _Plan | None = None
        self._unlearnt: list[Callable[[], None]] = []
        self._before: Items[Decode] = ()
        self._idle = 0.0
        self._ended = perf_counter()
        self._load = 1  # sequences that the newest step would serve in plain decoding

    def admit(self, jobs: Items[Decode], trees: Items[TokenTree], step: Step) -> list[TokenTree]:
        """Cut the trees of a step that begins now.

        Args:
            jobs: Its generations, at least one.
            trees: Their trees, likeliest nodes first.
            step: The step without any of their nodes; the idle time is added here.
        """
        began = perf_counter()
        self.learn()
        states = [self._state(job.sequence) for job in jobs]
        plain_seconds = self._plain_step(jobs, step, began)
        tokens, attended, decided = step.tokens, float(step.attended), None
        if any(map(len, trees)):
            self._idle += _NEWEST * (min(began - self._ended, _AWAY) - self._idle)
            trees = self._cut(jobs, trees, states, step)
            counts = [len(tree) for tree in trees]
            tokens += sum(counts)
            attended += sum(
                count * job.sequence.committed for count, job in zip(counts, jobs, strict=True)
            )
            decided = perf_counter() - began
        plain = self._load == step.emitted and not any(state.drafting for state in states)
        self._plan = _Plan(
            jobs,
            plain_seconds,
            step.tokens > step.emitted,
            plain,
            tokens,
            attended,
            decided,
        )
        return list(trees)

    def stepped(self, began: float, ended: float, served: Items[Served] = ()) -> float | None:
        """A step ran without an error.

        Args:
            began: When it began (time.perf_counter).
            ended: When it ended.
            served: Results of its generations.

        Returns:
            Time it took to decide on its trees; None if it had none. Unit: seconds.
        """
        plan, self._plan = self._plan, None
        passed, self._ended = ended - self._ended, ended
        if plan is None:
            self._before = ()
            self._clock.advance_beside_prefill()
            return None
        if not plan.prompts:
            counts = len(plan.jobs), plan.tokens, plan.attended
            self._unlearnt.append(partial(self._costs.observe, *counts, ended - began))
            if plan.plain and plan.jobs == self._before:
                self._clock.observe(self._load, passed, plan.plain_seconds)
        self._before = plan.jobs
        self._clock.advance(self._load, passed - (ended - began), plan.plain_seconds)
        before = self._clock.now
        self._clock.advance(self._load, ended - began, plan.plain_seconds)
        if not plan.plain:
            self._clock.drafted(self._load)
            self._charge(self._clock.now - before, served)
        for each in served:
            self._answered(each, ended)
        return plan.decided

    def learn(self) -> None:
        """Correct step times and confidences by the last step.

        It takes longer than all else here, so the engine calls it while drafters work.
        """
        unlearnt, self._unlearnt = self._unlearnt, []
        for observe in unlearnt:
            observe()

    def budget(self, sequence: Sequence) -> int:
        """Nodes to draft next for a sequence at most; 0: decode plainly for now."""
        state = self._state(sequence)
        return state.nodes if state.balance > 0 and self._clock.known(self._load) else 0

    def budget_sent(self, sequence: Sequence, budget: int) -> None:
        """The next tree was requested with this budget; 0: the next step is plain."""
        state = self._state(sequence)
        state.budget_sent(self._clock.now, budget)
        state.seen = self._ended

    def forget(self, sequence: Sequence) -> None:
        """A sequence was released."""
        state = self._states.pop(sequence, None)
        if state is not None:
            state.ended()

    def to_json(self) -> dict[str, Any]:
        """What it learnt, to be stored beside the cost table."""
        return {
            "plain": self._clock.to_json(),
            "drafters": self._drafters.to_json(),
            "costs": self._costs.to_json(),
        }

    def load_json(self, stored: dict[str, Any]) -> None:
        """Take over what an earlier process stored.

        Raises:
            ValueError: It is not what ``to_json`` returns.
        """
        try:
            self._clock.load_json(stored["plain"])
            self._drafters.load_json(stored["drafters"])
            self._costs.load_json(stored["costs"])
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not the state of a scheduler: {error!r}") from error

    def _cut(
        self,
        jobs: Items[Decode],
        trees: Items[TokenTree],
        states: Items[SequenceState],
        step: Step,
    ) -> list[TokenTree]:
        drawn = [job.sequence.generation.sampling.rejection for job in jobs]
        fixed = self._idle + self._costs.sequence_seconds(
            step.emitted, step.attended / step.tokens
        )  # whatever the step's size
        counts = admit(
            [
                _parents_survivals(tree.survivals) if causal else tree.survivals
                for tree, causal in zip(trees, drawn, strict=True)
            ],
            [job.sequence.committed for job in jobs],
            Step(step.tokens, step.attended, step.emitted, fixed),
            self._costs,
            exponents=[
                # An attempt after a suspension counts on the drafter's own confidences: by those
                # that led to the suspension, nothing would be checked and nothing learnt.
                1.0 if causal or state.exploring else state.calibration.exponent
                for state, causal in zip(states, drawn, strict=True)
            ],
            causal=any(causal and len(tree) > 0 for causal, tree in zip(drawn, trees, strict=True)),
        )
        for state, tree, count, causal in zip(states, trees, counts, drawn, strict=True):
            if len(tree) > 0 and not causal:
                state.admitted(len(tree), count)
        return [tree.first(count) for tree, count in zip(trees, counts, strict=True)]

    def _plain_step(self, jobs: Items[Decode], step: Step, now: float) -> float:
        """Predicted time of a plain step of the load, which includes drafting sequences away."""
        here = {job.sequence for job in jobs}
        away = sum(
            state.drafting and sequence not in here and now - state.seen < _AWAY
            for sequence, state in self._states.items()
        )
        self._load = step.emitted + away
        per_sequence = step.attended // step.tokens
        return self._costs.profiled.step_seconds(
            self._load, step.tokens + away, step.attended + away * per_sequence
        )

    def _charge(self, passed: float, served: Items[Served]) -> None:
        """Charge drafting sequences with the time by which they make steps longer.

        All sequences in a step lose this time, whoever's nodes it checks. They get it back, and
        each tree pays by its number of nodes. A sequence would otherwise stop drafting because
        others draft, and they would slow it down all the same. Without trees, sequences that draft
        meanwhile pay: on a CPU their drafters take time from the step.

        Args:
            passed: Duration of the step. Unit: plain tokens.
            served: What came of it.
        """
        lost = max(0.0, passed - 1.0)
        here = [self._state(each.job.sequence) for each in served]
        weights = {
            state: len(each.tree)
            for state, each in zip(here, served, strict=True)
            if len(each.tree) > 0
        }
        if not weights:
            weights = {state: 1 for state in self._states.values() if state.drafting}
        if not weights:
            return
        for state in here:
            state.interference -= lost
        share = lost * len(here) / sum(weights.values())
        for state, weight in weights.items():
            state.interference += share * weight

    def _answered(self, served: Served, ended: float) -> None:
        sequence = served.job.sequence
        state = self._state(sequence)
        state.seen = ended
        tree = len(served.job.tree) > 0
        if len(served.tree) > 0 and not sequence.generation.sampling.rejection:
            for calibration in (state.calibration, state.drafter.calibration):
                accepted = len(served.output.accepted)
                observe = partial(calibration.observe, served.tree.survivals, accepted)
                self._unlearnt.append(observe)
        state.answered(self._clock.now, len(served.output.tokens), tree=tree)

    def _state(self, sequence: Sequence) -> SequenceState:
        state, name = self._states.get(sequence), sequence.drafter
        if state is None or state.name != name:  # new, or now drafted by another drafter
            if state is not None:
                state.ended()
            state = SequenceState(self._drafters.of(name or ""), self._most_nodes, name)
            self._states[sequence] = state
        return state


def _parents_survivals(survivals: Floats) -> Floats:
    """Survivals of a chain of samples by the confidences of the nodes above each.

    Appendix A: the admission of a sample may depend on nothing that was drawn for its position or
    later. A confidence that is the drafter's own probability would depend on the sample.
    """
    above: Floats = np.concatenate(([1.0], survivals[:-1]))[: len(survivals)] * DEFAULT_CONFIDENCE
    return above
