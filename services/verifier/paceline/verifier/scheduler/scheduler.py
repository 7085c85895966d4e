"""The scheduler: which drafted nodes a step verifies, and which sequences draft.

Admission (DSpark 3.2.2 and 5.2): a step without drafted nodes emits one token per sequence. Each
node adds its survival, the probability that it is accepted, to the expected number of tokens, and
its cost to the time of the step. Survival never rises along a path, so the nodes of all trees are
sorted by survival, and each cut of that list leaves valid trees. The search finds the cut with the
most tokens per second.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from paceline.decoder import Decoder
from paceline.decoder.remembered import cache_file, store
from paceline.device import device_of
from paceline.kernels import cpu_kernels, processor_name
from paceline.service.cpus import usable_cpus
from paceline.tree import TokenTree, accepted_tokens
from paceline.verifier.scheduler.controller import Drafters, PlainClock, SequenceState
from paceline.verifier.scheduler.costs import WEIGHT, Costs, CostTable, flat_table, profile

if TYPE_CHECKING:
    from paceline.text import Text
    from paceline.verifier.engine.drafted import DraftedText
    from paceline.verifier.engine.report import StepOutput

_MAX_IDLE = 5.0  # seconds; a longer wait was not for trees

# Plain steps of one generation behind a prompt or a draft that are not measured. They are slower,
# by up to a half: caches are cold, and a drafter may be opening the sequence. Of several
# generations fewer: their steps are longer, and others come and go.
_SETTLING = 4

# Plain steps in whose time a step with pieces of prompts should end, counted from the end of the
# step before. With what the table does not know, texts beside them get a token in about four.
MAX_GAP = 3.0

_PROMPT_WEIGHT = 0.25  # of the newest step with pieces of prompts: they last for a few steps

MIN_PROMPT = 16  # tokens of prompts that a step takes beside any rounds

_AHEAD = 32  # nodes up to which the cheapest ones are sought before trees are made
_FORMAT = 9  # of the file, and of what is measured
_TOO_SLOW = 0.75  # learnt scale of a table below which it was measured beside other processes


@dataclass(frozen=True, slots=True)
class _Plan:
    """The step that runs."""

    jobs: Sequence[DraftedText]  # its generations
    expected: Sequence[float]  # for each generation, the sum of its admitted nodes' survivals
    nodes: Sequence[int]  # for each generation, the number of its admitted nodes
    plain_seconds: float  # predicted time of a plain step of all generations. Unit: seconds.
    prompts: bool  # whether it holds pieces of prompts
    plain: bool  # whether its time is plain decoding's
    tokens: int  # batch tokens, admitted nodes included
    context: float  # KV tokens that each attends to, on average


class Scheduler:
    """Cuts trees to the nodes worth verifying (admission) and sets node budgets (controller).

    Safety contract: it changes speed only. Whatever it decides, the tokens are the same. Only the
    engine thread uses it.
    """

    def __init__(
        self,
        costs: CostTable,
        max_nodes: int,
        clock: Callable[[], float] = perf_counter,
        *,
        lockstep: bool = False,
    ) -> None:
        """Make a scheduler by step times as profiled, which are corrected as steps run, for budgets
        of at most ``max_nodes``. ``clock`` is the engine's, in seconds. ``lockstep``: no drafter
        works during a step, so a step without drafted nodes is a plain one whatever was drafted
        before it."""
        self._now = clock
        self._lockstep = lockstep
        self.costs = Costs(costs)
        self._max_nodes = max_nodes
        self._clock = PlainClock()
        self._drafters = Drafters()
        self._states: dict[Text, dict[str | None, SequenceState]] = {}  # by drafter
        self._plan: _Plan | None = None
        self._before: Sequence[DraftedText] = ()
        self._plain_steps = 0  # of the same generations, one after the other
        self._idle = 0.0
        self._context = 1.0  # KV tokens that a batch token attended to lately
        self._ended = self._now()
        self._least: float | None = None  # of the next step, once it was asked for
        self._load = 1  # sequences that the newest step would serve in plain decoding
        # Time of steps with pieces of prompts, over what the table says: scores of prompts take
        # longer, and without, fewer logits are computed than in its steps. It is bounded: what else
        # keeps the machine busy slows plain steps too.
        self._prompts = 1.0

    def admit(
        self,
        jobs: Sequence[DraftedText],
        trees: Sequence[TokenTree],
        tokens: int,
        attended: int,
        away: int,
    ) -> list[TokenTree]:
        """Cut the trees of a step that begins now, whose nodes are sorted by falling survival.
        Without drafted nodes it has so many batch ``tokens``, one anchor a generation and prompts,
        which attend to ``attended`` KV tokens in all; ``away`` generations wait for a tree
        meanwhile."""
        began = self._now()
        states = [self._state(job) for job in jobs]
        context = self._context = attended / tokens
        self._load = len(jobs) + away
        plain_seconds = self.costs.plain_seconds(self._load, tokens + away, context)
        survivals = [
            _survivals(job, tree, state)
            for job, tree, state in zip(jobs, trees, states, strict=True)
        ]
        counts, drafted = [0] * len(jobs), sum(map(len, trees))
        if drafted:
            self._idle += WEIGHT * (min(began - self._ended, _MAX_IDLE) - self._idle)
            times = self.costs.seconds(len(jobs), tokens, context, drafted)
            causal = any(
                len(tree) and job.text.sampling.rejection
                for job, tree in zip(jobs, trees, strict=True)
            )
            counts = admit(
                survivals, len(jobs), [self._idle + time for time in times], causal=causal
            )
            for job, tree, state, count in zip(jobs, trees, states, counts, strict=True):
                if len(tree) and job.asked and not job.text.sampling.rejection:
                    state.account.admitted(len(tree), count)
        if self._lockstep:
            plain = not any(counts)
        else:
            plain = not away and not drafted and not any(state.busy for state in states)
        self._plan = _Plan(
            jobs,
            [sum(nodes[:count]) for nodes, count in zip(survivals, counts, strict=True)],
            counts,
            plain_seconds,
            tokens > len(jobs),
            plain,
            tokens + sum(counts),
            context,
        )
        return [tree.first(count) for tree, count in zip(trees, counts, strict=True)]

    def prompt_tokens(self, streams: int, rounds: int, begins: int, max_tokens: int) -> int:
        """Return how many tokens of prompts the next step takes, at most ``max_tokens``, beside
        ``streams`` texts with ``rounds`` batch tokens; the first prompt goes on at ``begins``.

        They leave it within :data:`MAX_GAP`. Where drafted nodes need more than half of this time,
        prompts have the other half all the same, and never less than :data:`MIN_PROMPT`, so that
        they go on beside any load.
        """
        plain = self.costs.plain_seconds(streams, streams, self._context)
        beside = self.costs.plain_seconds(streams, rounds, self._context)
        passed = (self._now() - self._ended) / self._clock.seconds(streams, plain)
        limit = max(plain * (MAX_GAP - passed), beside + plain * MAX_GAP / 2) / self._prompts
        first, *times = self.costs.profiled_seconds(1, rounds, begins, max_tokens)
        room = sum(beside + time - first <= limit for time in times)
        return min(max_tokens, max(MIN_PROMPT, room))

    def hold(self, ready: int, arrivals: Sequence[float]) -> float:
        """Return the seconds for which a step had better wait for trees, expected at ``arrivals``
        (time.perf_counter), while so many generations and prompts are ``ready``; 0: it begins now.

        Generations whose trees come during a step wait for its end. If the step waits, those that
        are ready wait for the trees. Whichever costs less in all is chosen, so generations that
        draft and others share steps.
        """
        now = self._now()
        step = self.costs.seconds(ready, ready, self._context)[0]
        times = [time - now for time in arrivals if 0 < time - now < step]
        if not times or ready * max(times) >= sum(step - time for time in times):
            return 0.0
        return max(times)

    def stepped(
        self,
        began: float,
        ended: float,
        outputs: Sequence[StepOutput | None] = (),
        waited: Mapping[DraftedText, str] | None = None,
    ) -> int:
        """Learn from a step that ran without an error.

        Args:
            began: When it began (time.perf_counter).
            ended: When it ended.
            outputs: Of its generations, in the order of :meth:`admit`; None: the job failed. None
                at all: the step ran other generations, or prompts beside them that were not known
                before, and nothing is learnt from it.
            waited: Texts whose trees all of the step waited for before it began, with the
                names of their drafters, which pay for that; for engines where a tree that is late
                stops the others too.

        Returns the time of a plain step under the same load; 0: not measured. Unit: microseconds.
        """
        plan, self._plan, self._least = self._plan, None, None
        passed, self._ended = ended - self._ended, ended
        if plan is None or not outputs:  # in plain decoding, each sequence gets a token in it
            self._before = ()
            self._clock.now += 1.0
            return 0
        plain = plan.plain and not waited
        self._learn_costs(plan, ended - began, passed, plain=plain)
        here = [self._state(job) for job in plan.jobs]
        self._pass_time(plan, here, passed, ended - began, waited or {}, plain=plain)
        for job, state, expected, nodes, output in zip(
            plan.jobs, here, plan.expected, plan.nodes, outputs, strict=True
        ):
            if output is not None:
                self._credit(job, state, expected, nodes, output)
        return round(1e6 * self._clock.measured(self._load, plan.plain_seconds))

    def _learn_costs(self, plan: _Plan, seconds: float, passed: float, *, plain: bool) -> None:
        """Correct the times of steps by one that took ``seconds`` and ended ``passed`` seconds
        after the step before."""
        if plan.prompts and self.measured:
            predicted = self.costs.plain_seconds(len(plan.jobs), plan.tokens, plan.context)
            ratio = seconds / self._clock.seconds(self._load, predicted)
            self._prompts += _PROMPT_WEIGHT * (min(max(ratio, 0.7), 1.5) - self._prompts)
        elif not plan.prompts:
            self.costs.observe(len(plan.jobs), plan.tokens, plan.context, seconds)
            same = plain and plan.jobs == self._before
            self._plain_steps = self._plain_steps + 1 if same else 0
            if self._plain_steps > _SETTLING // len(plan.jobs):
                self._clock.observe(self._load, passed, plan.plain_seconds)
        self._before = plan.jobs

    def _pass_time(
        self,
        plan: _Plan,
        here: Sequence[SequenceState],
        passed: float,
        seconds: float,
        waited: Mapping[DraftedText, str],
        *,
        plain: bool,
    ) -> None:
        """Let the plain clock go on by a step, and charge those who draft with the time that the
        others lose: for trees that all waited for, and for longer steps."""
        if not plain:
            self._clock.drafted(self._load)
        before = self._clock.now
        self._clock.advance(self._load, passed - seconds, plan.plain_seconds)
        if waited:
            payers = [(self._state(job, name), 1) for job, name in waited.items()]
            _share(self._clock.now - before, here, payers)
        before = self._clock.now
        self._clock.advance(self._load, seconds, plan.plain_seconds)
        if not plain:
            self._charge(plan, here, self._clock.now - before)

    def _credit(
        self,
        job: DraftedText,
        state: SequenceState,
        expected: float,
        nodes: int,
        output: StepOutput,
    ) -> None:
        """Credit the drafter of a text with the tokens of a step that verified so many nodes, whose
        survivals sum to ``expected``."""
        if nodes and job.asked and not job.text.sampling.rejection:
            state.account.accepted(expected, len(output.accepted))
        emitted = len(output.tokens)
        if job.asked:  # not with what the local tree alone would have brought
            emitted -= accepted_tokens(job.guess, output.tokens)
        state.answered(self._clock.now, emitted, tree=job.asked and len(job.tree) > 0)
        for other in self._states[job.text].values():
            if other is not state:
                other.passed_over(self._clock.now, emitted)

    @property
    def measured(self) -> bool:
        """Whether plain decoding was measured under the present load, which comes first."""
        return self._clock.known(self._load)

    def min_survival(self) -> float:
        """Return :func:`min_survival` for the next step under the present load."""
        if self._least is None:
            load = self._load
            times = self.costs.seconds(load, load, self._context, _AHEAD)
            self._least = min_survival(load, [self._idle + time for time in times])
        return self._least

    def budget(self, job: DraftedText) -> int:
        """Return the maximum number of nodes to draft next for a text; 0: decode plainly."""
        state = self._state(job)
        if not (self._clock.known(self._load) and state.drafts):
            return 0
        return max(1, min(self._max_nodes, round(state.account.nodes)))

    def budget_sent(self, job: DraftedText, budget: int) -> None:
        """Note the budget of the next tree, which was requested; 0: the next step is plain."""
        self._state(job).requested(self._clock.now, budget)

    def asks(self, job: DraftedText, local: TokenTree) -> bool:
        """Return whether a tree of its drafter is worth its time beside a ``local`` one."""
        return self._state(job).asks(sum(local.survivals))

    def opening(self, job: DraftedText) -> None:
        """Note that its drafter reads the text beside the next step, which has no tree of it."""
        self._state(job).opening(self._clock.now)

    def forget(self, text: Text, drafter: str | None = None) -> None:
        """Drop what was learnt of a text that has ended, or only what it learnt of a drafter."""
        if drafter is None:
            for state in self._states.pop(text, {}).values():
                state.end()
        elif (named := self._states.get(text)) is not None:
            named.pop(drafter, None)

    def to_json(self) -> dict[str, Any]:
        """Return what it learnt, to be stored beside the cost table."""
        return {
            "plain": self._clock.to_json(),
            "drafters": self._drafters.to_json(),
            "costs": self.costs.to_json(),
        }

    def load_json(self, stored: dict[str, Any]) -> None:
        """Take over what an earlier process stored. Raises any error of a value that has not the
        form of :meth:`to_json`."""
        self._clock.load_json(stored["plain"])
        self._drafters.load_json(stored["drafters"])
        self.costs.load_json(stored["costs"])

    def _charge(self, plan: _Plan, here: Sequence[SequenceState], passed: float) -> None:
        """Charge drafting sequences with the time by which they make a step longer; ``here`` are
        the states of its generations, ``passed`` plain tokens its duration.

        All sequences in a step lose this time, whoever's nodes it verifies. They get it back, and
        each tree pays by its number of nodes. A sequence would otherwise stop drafting because
        others draft, and they would slow it down all the same. Without trees, sequences that draft
        meanwhile pay: on a CPU their drafters take time from the step.
        """
        payers = list(zip(here, plan.nodes, strict=True))
        if not any(plan.nodes):
            states = (state for named in self._states.values() for state in named.values())
            payers = [(state, 1) for state in states if state.busy]
        _share(max(0.0, passed - 1.0), here, payers)

    def _state(self, job: DraftedText, drafter: str | None = None) -> SequenceState:
        """Return the state of a text with a drafter, by default with the one that it has now."""
        named, name = self._states.setdefault(job.text, {}), drafter or job.drafted_by
        if (state := named.get(name)) is None:
            account = self._drafters.of(name or "")
            state = named[name] = SequenceState(account, self._clock.now, len(job.text))
        return state


def _share(
    lost: float, here: Sequence[SequenceState], payers: Sequence[tuple[SequenceState, int]]
) -> None:
    """Give so many plain tokens back to each sequence of a step; payers owe them by weight."""
    share = lost * len(here) / max(1, sum(weight for _, weight in payers))
    for state in here:
        state.owed -= lost
    for state, weight in payers:
        state.owed += share * weight


def admit(
    survivals: Sequence[Sequence[float]],
    emitted: int,
    seconds: Sequence[float],
    *,
    causal: bool = False,
) -> list[int]:
    """Choose how many of the likeliest nodes of several trees to verify.

    It runs once a step, between two steps that have emptied the caches: plain Python for a few
    nodes is faster than arrays.

    Args:
        survivals: For each tree the survival of its nodes, falling, parents before their children.
        emitted: Tokens that the step emits without any node.
        seconds: Time of the step with 0, 1, 2, ... nodes.
        causal: Stop where the throughput first fails to rise, as Algorithm 1 does. Then no decision
            on a node depends on it or on what was drafted after it, which rejection sampling needs
            to stay exact (appendix A). Without it all cuts are compared: exact for the
            drafter-invariant contract only, and better where costs are jagged.

    Returns:
        For each tree the number of its first nodes to verify.
    """
    nodes = [(-survival, owner) for owner, tree in enumerate(survivals) for survival in tree]
    nodes.sort(key=lambda node: node[0])  # stable: of equal nodes, parents first
    expected, cut = float(emitted), 0
    best = expected / seconds[0]
    for count, (negated, _) in enumerate(nodes, 1):
        expected -= negated
        rate = expected / seconds[count]
        if rate > best:
            best, cut = rate, count
        elif causal:
            break
    counts = [0] * len(survivals)
    for _, owner in nodes[:cut]:
        counts[owner] += 1
    return counts


def min_survival(emitted: int, seconds: Sequence[float]) -> float:
    """Return the survival below which no node is worth its time, whatever others are drafted, in a
    step that emits so many tokens and takes ``seconds`` with 0, 1, 2, ... nodes.

    Nodes as likely as this gain what they cost where a node costs least. So :func:`admit` takes
    none of trees whose nodes are all less likely, and sources need not make them.
    """
    plain, *others = seconds
    return emitted * min((time / plain - 1) / nodes for nodes, time in enumerate(others, 1))


def _survivals(job: DraftedText, tree: TokenTree, state: SequenceState) -> list[float]:
    """Return the survivals of a tree's nodes, by which they are admitted.

    Those of a chain of samples are what the drafter sent: they depend on no sample at the node's
    position or later, as the protocol asks of a drafter, so the admission does not either (DSpark,
    appendix A). An exponent learnt from accepted tokens would depend on samples before.
    """
    if job.text.sampling.rejection or not job.asked:
        return list(tree.survivals)  # of a local tree they are learnt where it is made
    return [survival**state.account.exponent for survival in tree.survivals]


def load_scheduler(
    decoder: Decoder,
    max_context: int,
    max_nodes: int,
    *,
    again: bool = False,
    measure: Callable[[Decoder, int], CostTable] = profile,
) -> Scheduler:
    """Return the scheduler of a model's shape on this kind of machine, with what the last one
    learnt; weights make no difference.

    The table is measured if none is stored, or ``again``. Of several processes that start at a time
    one measures, and the others wait for it: they would only disturb each other. A table whose
    steps then took much less time than it says was measured on a busy machine: it is measured
    again, and what was learnt with it is dropped.
    """
    file = _file(decoder)
    with _alone(file.with_suffix(".lock")):
        # Nothing, or it is damaged.
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            stored = json.loads(file.read_text())
            table, learnt = CostTable.from_json(stored["table"]), stored["learnt"]
            if not again and (learnt is None or learnt["costs"]["scale"] >= _TOO_SLOW):
                scheduler = Scheduler(table, max_nodes)
                if learnt is not None:
                    scheduler.load_json(learnt)
                return scheduler
        # On a GPU a profile would run without the engine's graphs.
        on_gpu = device_of(decoder.device).runs_beside
        table = flat_table() if on_gpu else measure(decoder, max_context)
        store(file, {"table": asdict(table), "learnt": None})
    return Scheduler(table, max_nodes)


def save_scheduler(scheduler: Scheduler, decoder: Decoder) -> None:
    """Store what a scheduler learnt. Of several verifiers of one model the last one counts."""
    learnt = scheduler.to_json()
    store(_file(decoder), {"table": asdict(scheduler.costs.profiled), "learnt": learnt})


def _file(decoder: Decoder) -> Path:
    facts = (
        _FORMAT,
        decoder.config,
        str(decoder.device),
        torch.get_num_threads(),
        torch.__version__,
        cpu_kernels().level,
        (processor_name(), usable_cpus()),
    )
    return cache_file("costs", facts)


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Hold a file's lock, which the system frees if the process dies. Without one if it fails."""
    with ExitStack() as held:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fcntl.flock(held.enter_context(file.open("w")), fcntl.LOCK_EX)
        yield
