"""The scheduler: which drafted nodes a step verifies, and which sequences draft."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paceline.tree import DEFAULT_CONFIDENCE, TokenTree
from paceline.verifier.scheduler.admission import StepLoad, admit, expected_nodes
from paceline.verifier.scheduler.controller import Drafters, PlainClock, SequenceState
from paceline.verifier.scheduler.costs import CostTable, LiveCosts

if TYPE_CHECKING:
    from paceline.verifier.engine.job import Decode, StepOutput
    from paceline.verifier.engine.sequence import Sequence

_NEWEST = 0.1  # weight of the newest step in the mean idle time
_MAX_IDLE = 5.0  # seconds; a longer wait was not for trees


@dataclass(frozen=True, slots=True)
class Served:
    """A generation in a step: the verified nodes of its tree, and the result."""

    job: Decode
    tree: TokenTree
    output: StepOutput


@dataclass(frozen=True, slots=True)
class _Plan:
    """The step that runs.

    Attributes:
        jobs: Its generations.
        plain_seconds: Predicted time of a plain step of all generations. Unit: seconds.
        prompts: Whether it holds pieces of prompts.
        plain: Whether no sequence drafts.
        tokens: Batch tokens, verified nodes included.
        attended: KV tokens that they attend to, summed over them.
        decided: Time of the decision on its trees; None: it has none. Unit: seconds.
    """

    jobs: Items[Decode]
    plain_seconds: float
    prompts: bool
    plain: bool
    tokens: int
    attended: float
    decided: float | None


class Scheduler:
    """Cuts trees to the nodes worth verifying (admission) and sets node budgets (controller).

    Safety contract: it changes speed only. Whatever it decides, the tokens are the same. Only the
    engine thread uses it.
    """

    def __init__(self, costs: CostTable, max_nodes: int) -> None:
        """Make a scheduler.

        Args:
            costs: Step times as profiled; corrected as steps run.
            max_nodes: Largest node budget.
        """
        self._costs = LiveCosts(costs)
        self._max_nodes = max_nodes
        self._clock = PlainClock()
        self._drafters = Drafters()
        self._states: dict[Sequence, SequenceState] = {}
        self._plan: _Plan | None = None
        self._unlearnt: list[Callable[[], None]] = []
        self._before: Items[Decode] = ()
        self._idle = 0.0
        self._ended = perf_counter()
        self._load = 1  # sequences that the newest step would serve in plain decoding

    def admit(
        self, jobs: Items[Decode], trees: Items[TokenTree], step: StepLoad, away: int
    ) -> list[TokenTree]:
        """Cut the trees of a step that begins now.

        Args:
            jobs: Its generations, at least one.
            trees: Their trees, likeliest nodes first.
            step: The step without any of their nodes.
            away: Generations that wait for a tree meanwhile.
        """
        began = perf_counter()
        self.learn()
        states = [self._state(job.sequence) for job in jobs]
        context = step.attended / step.tokens
        self._load = step.emitted + away
        plain_seconds = self._costs.profiled.step_seconds(
            self._load, step.tokens + away, step.attended + away * context
        )
        tokens, attended, decided = step.tokens, float(step.attended), None
        if any(map(len, trees)):
            self._idle += _NEWEST * (min(began - self._ended, _MAX_IDLE) - self._idle)
            trees = self._cut(jobs, trees, states, step, context)
            for job, tree in zip(jobs, trees, strict=True):
                tokens += len(tree)
                attended += len(tree) * job.sequence.committed
            decided = perf_counter() - began
        self._plan = _Plan(
            jobs,
            plain_seconds,
            step.tokens > step.emitted,
            not away and not any(state.drafting for state in states),
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
            Time of the decision on its trees; None if it had none. Unit: seconds.
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
        plain_us = round(1e6 * self._clock.measured(self._load, plan.plain_seconds))
        for each in served:
            each.output.plain_us = plain_us
            self._answered(each)
        return plan.decided

    def learn(self) -> None:
        """Correct step times and confidences by the last step.

        It takes longer than all else here, so the engine calls it while drafters work.
        """
        unlearnt, self._unlearnt = self._unlearnt, []
        for observe in unlearnt:
            observe()

    def budget(self, sequence: Sequence) -> int:
        """Maximum number of nodes to draft next for a sequence; 0: decode plainly for now."""
        state = self._state(sequence)
        return state.nodes if state.balance > 0 and self._clock.known(self._load) else 0

    def budget_sent(self, sequence: Sequence, budget: int) -> None:
        """The next tree was requested with this budget; 0: the next step is plain."""
        self._state(sequence).budget_sent(self._clock.now, budget)

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
        step: StepLoad,
        context: float,
    ) -> list[TokenTree]:
        costs = self._costs
        fixed = self._idle + costs.sequence_seconds(step.emitted, context)
        survivals: list[Items[float]] = []
        causal = False
        for job, tree, state in zip(jobs, trees, states, strict=True):
            if job.sequence.generation.sampling.rejection:
                causal = causal or len(tree) > 0
                survivals.append(_parents_survivals(tree.survivals))
            elif state.exploring or not len(tree):
                # An attempt after a suspension counts on the drafter's own confidences: by those
                # that led to the suspension, no node would be verified and nothing learnt.
                survivals.append(tree.survivals)
            else:
                exponent = state.calibration.exponent
                survivals.append([survival**exponent for survival in tree.survivals])
        times = (fixed + seconds for seconds in costs.growth(step.tokens, context))
        counts = admit(survivals, step.emitted, times, causal=causal)
        for job, state, tree, count in zip(jobs, states, trees, counts, strict=True):
            if len(tree) > 0 and not job.sequence.generation.sampling.rejection:
                state.admitted(len(tree), count)
        return [tree.first(count) for tree, count in zip(trees, counts, strict=True)]

    def _charge(self, passed: float, served: Items[Served]) -> None:
        """Charge drafting sequences with the time by which they make a step longer.

        All sequences in a step lose this time, whoever's nodes it verifies. They get it back, and
        each tree pays by its number of nodes. A sequence would otherwise stop drafting because
        others draft, and they would slow it down all the same. Without trees, sequences that draft
        meanwhile pay: on a CPU their drafters take time from the step.

        Args:
            passed: Duration of the step. Unit: plain tokens.
            served: Results of its generations.
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

    def _answered(self, served: Served) -> None:
        sequence = served.job.sequence
        state = self._state(sequence)
        if len(served.tree) > 0 and not sequence.generation.sampling.rejection:
            observe = partial(_calibrate, state, served.tree, len(served.output.accepted))
            self._unlearnt.append(observe)
        drafted = len(served.job.tree) > 0
        state.answered(self._clock.now, len(served.output.tokens), tree=drafted)

    def _state(self, sequence: Sequence) -> SequenceState:
        state, name = self._states.get(sequence), sequence.drafter
        if state is None or state.name != name:  # new, or now drafted by another drafter
            if state is not None:
                state.ended()
            state = SequenceState(self._drafters.of(name or ""), self._max_nodes, name)
            self._states[sequence] = state
        return state


def _calibrate(state: SequenceState, tree: TokenTree, accepted: int) -> None:
    expected = expected_nodes(tree.survivals)
    state.calibration.observe(expected, accepted)
    state.drafter.calibration.observe(expected, accepted)


def _parents_survivals(survivals: Items[float]) -> list[float]:
    """Survivals of a chain of samples by the confidences of the nodes above each.

    Appendix A: the admission of a sample may depend on nothing that was drawn for its position or
    later. A confidence that is the drafter's own probability would depend on the sample.
    """
    above = [1.0, *survivals[:-1]]
    return [DEFAULT_CONFIDENCE * survival for survival in above[: len(survivals)]]
