"""Generations on a simulated verifier: the scheduler decides, a virtual clock counts.

Nothing here depends on the speed of the machine that runs it. Times are in plain steps of one
sequence.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from paceline.tree import EMPTY, TokenTree
from paceline.verifier.engine.job import StepOutput
from paceline.verifier.scheduler import scheduler as module
from paceline.verifier.scheduler.costs import CostTable
from paceline.verifier.scheduler.scheduler import Scheduler

STEP = 0.005
"""Duration of a plain step of one sequence. Unit: seconds."""

CONTEXT = 200
MODES = ("plain", "always", "scheduled")
"""No drafter; a draft in every round, whose nodes are admitted; the controller decides."""

Accepted = Callable[[int, int, random.Random], int | None]
"""Number of drafted tokens that are accepted, by the number of the generation and its number of
tokens so far; None: the tree is empty."""


@dataclass(frozen=True)
class Costs:
    """Durations. Unit: plain steps of one sequence.

    Attributes:
        token: One more row of a step.
        drafting: A draft of one sequence; the first of a sequence takes twice as long.
        batched: One more sequence in the same draft, as a part of ``drafting``.
        beside: Messages and waking up, in each drafted round.
        contention: By how much a step is longer for each unit of draft beside it.
        noise: Part by which durations vary.
        slow: Factor of all durations in every second phase of 500 steps.
    """

    token: float = 0.06
    drafting: float = 0.5
    batched: float = 0.1
    beside: float = 0.15
    contention: float = 0.5
    noise: float = 0.1
    slow: float = 1.0


class _Sequence(SimpleNamespace):
    """What the scheduler reads of a sequence."""

    __hash__ = object.__hash__


@dataclass
class _Generation:
    """A generation.

    Attributes:
        number: Its number.
        job: What the scheduler knows of it.
        left: Tokens still to emit.
        began: When it began.
        got: Tokens so far.
        ready_at: When its next step may begin.
        asked_at: When its tree was requested.
        opened: Whether one was requested before.
    """

    number: int
    job: Any
    left: int
    began: float
    got: int = 0
    ready_at: float = 0.0
    asked_at: float = 0.0
    opened: bool = False


@dataclass
class Simulation:
    """A verifier under a closed load: a generation that ends is followed by another one.

    Attributes:
        accepted: How good the drafter is.
        users: Generations at a time.
        mode: One of `MODES`.
        costs: Durations.
        kinds: Generations whose number has the same rest are of the same kind.
        nodes: Of a tree.
        length: Tokens of a generation.
        rounds: Rounds with trees so far.
    """

    accepted: Accepted
    users: int
    mode: str
    costs: Costs = field(default_factory=Costs)
    kinds: int = 1
    nodes: int = 8
    length: int = 128
    rounds: int = 0

    def __post_init__(self) -> None:
        tokens = 512
        longest = STEP * (1 + self.costs.token * (tokens - 1))
        self._random = random.Random(0)
        self._now = self._drafter_free = self._requested_at = self._latency = 0.0
        self._requested: list[_Generation] = []
        with self._clock():
            self.scheduler = Scheduler(CostTable((1, tokens), (STEP, longest)), 255)
        self._made = 0
        self._tokens: dict[int, int] = defaultdict(int)
        self._seconds: dict[int, float] = defaultdict(float)
        # The first generations differ in length, or all would end at the same time.
        self._running = [
            self._begin(1 + self.length * index // self.users) for index in range(self.users)
        ]

    def _clock(self) -> Any:
        return patch.object(module, "perf_counter", lambda: self._now * STEP)

    def run(self, duration: float) -> dict[int, float]:
        """Tokens of a generation in the time of a plain step of one sequence, by kind.

        Only what is emitted in this call counts.
        """
        self._tokens.clear()
        self._seconds.clear()
        end = self._now + duration
        for each in self._running:
            each.began = self._now
        with self._clock():
            self._plan([each for each in self._running if not each.ready_at])
            while self._now < end:
                self._draft()
                here = [each for each in self._running if each.ready_at <= self._now]
                away = [each for each in self._running if each not in here]
                arrivals = [STEP * (each.asked_at + 1.3 * self._latency) for each in away]
                held = self.scheduler.hold(len(here), arrivals) / STEP if here else inf
                if held:
                    free = self._drafter_free if self._requested else inf
                    self._now = min(free, self._now + held, *(each.ready_at for each in away))
                else:
                    self._step(here)
        for each in self._running:
            self._seconds[each.number % self.kinds] += self._now - each.began
        return {kind: self._tokens[kind] / self._seconds[kind] for kind in sorted(self._seconds)}

    def _begin(self, length: int) -> _Generation:
        self._made += 1
        sampling = SimpleNamespace(rejection=False)
        sequence = _Sequence(
            drafter=None if self.mode == "plain" else "some",
            committed=CONTEXT,
            generation=SimpleNamespace(sampling=sampling),
        )
        job = SimpleNamespace(sequence=sequence, tree=EMPTY)
        return _Generation(self._made, job, length, self._now)

    def _plan(self, generations: list[_Generation]) -> None:
        """Request trees for their next steps, or queue them."""
        for each in generations:
            sequence = each.job.sequence
            budget = {"plain": 0, "always": 255}.get(self.mode)
            if budget is None:
                budget = self.scheduler.budget(sequence)
            self.scheduler.budget_sent(sequence, budget)
            each.job.tree, each.ready_at = EMPTY, self._now
            if budget:
                each.ready_at, each.asked_at = inf, self._now
                self._requested.append(each)
        self._requested_at = self._now

    def _draft(self) -> None:
        """Draft for all that have requested a tree, if the drafter was idle by now."""
        began = max(self._drafter_free, self._requested_at)
        if not self._requested or (self._drafter_free > self._now):
            return
        requested, self._requested = self._requested, []
        first = not all(each.opened for each in requested)
        took = self.costs.drafting * (1 + first + self.costs.batched * (len(requested) - 1))
        self._drafter_free = began + self._duration(took)
        ready = self._drafter_free + self._duration(self.costs.beside)
        for each in requested:
            each.opened, each.ready_at = True, ready
            self._latency += 0.1 * (ready - each.asked_at - self._latency)
            if self.accepted(each.number, each.got, self._random) is not None:
                each.job.tree = TokenTree.chain([1] * self.nodes, [0.8] * self.nodes)

    def _step(self, here: list[_Generation]) -> None:
        jobs, trees = [each.job for each in here], [each.job.tree for each in here]
        away = len(self._running) - len(here)
        admitted = self.scheduler.admit(jobs, trees, len(here), CONTEXT * len(here), away)
        self.rounds += sum(len(tree) > 0 for tree in trees)
        began = self._now
        took = self._duration(1 + self.costs.token * (sum(map(len, admitted)) + len(here) - 1))
        beside = min(took, max(0.0, self._drafter_free - began))
        self._now += took + self.costs.contention * beside
        outputs: list[StepOutput] = []
        for each, tree in zip(here, admitted, strict=True):
            drafted = len(each.job.tree) > 0
            count = self.accepted(each.number, each.got, self._random) if drafted else 0
            count = min(count or 0, len(tree))
            outputs.append(StepOutput([1] * (count + 1), accepted=list(range(count))))
        self.scheduler.stepped(began * STEP, self._now * STEP, outputs)
        for each, output in zip(here, outputs, strict=True):
            emitted = len(output.tokens)
            each.left -= emitted
            each.got += emitted
            self._tokens[each.number % self.kinds] += emitted
            if each.left <= 0:
                self.scheduler.forget(each.job.sequence)
                self._seconds[each.number % self.kinds] += self._now - each.began
                new = self._begin(self.length)
                self._running[self._running.index(each)] = new
                here[here.index(each)] = new
        self._draft()  # what was requested before this step
        self._plan(here)

    def _duration(self, steps: float) -> float:
        """A duration on a machine that varies."""
        slow = self.costs.slow if self._now // 500 % 2 else 1.0
        return steps * slow * self._random.uniform(1 - self.costs.noise, 1 + self.costs.noise)
