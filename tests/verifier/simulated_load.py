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

from paceline.tree import EMPTY, TokenTree
from paceline.verifier.engine.job import StepOutput
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
        self.random = random.Random(0)
        self.now = self.drafter_free = self.requested_at = self.latency = 0.0
        self.requested: list[_Generation] = []
        table = CostTable((1, tokens), (STEP, longest))
        self.scheduler = Scheduler(table, 255, clock=lambda: self.now * STEP)
        self.made = 0
        self.tokens: dict[int, int] = defaultdict(int)
        self.seconds: dict[int, float] = defaultdict(float)
        # The first generations differ in length, or all would end at the same time.
        self.running = [
            self.begin(1 + self.length * index // self.users) for index in range(self.users)
        ]

    def run(self, duration: float) -> dict[int, float]:
        """Tokens of a generation in the time of a plain step of one sequence, by kind.

        Only what is emitted in this call counts.
        """
        self.tokens.clear()
        self.seconds.clear()
        end = self.now + duration
        for each in self.running:
            each.began = self.now
        self.plan([each for each in self.running if not each.ready_at])
        while self.now < end:
            self.draft()
            here = [each for each in self.running if each.ready_at <= self.now]
            away = [each for each in self.running if each not in here]
            arrivals = [STEP * (each.asked_at + 1.3 * self.latency) for each in away]
            held = self.scheduler.hold(len(here), arrivals) / STEP if here else inf
            if held:
                free = self.drafter_free if self.requested else inf
                self.now = min(free, self.now + held, *(each.ready_at for each in away))
            else:
                self.step(here)
        for each in self.running:
            self.seconds[each.number % self.kinds] += self.now - each.began
        return {kind: self.tokens[kind] / self.seconds[kind] for kind in sorted(self.seconds)}

    def begin(self, length: int) -> _Generation:
        self.made += 1
        sampling = SimpleNamespace(rejection=False)
        sequence = _Sequence(
            drafter=None if self.mode == "plain" else "some",
            committed=CONTEXT,
            generation=SimpleNamespace(sampling=sampling),
        )
        job = SimpleNamespace(sequence=sequence, tree=EMPTY, guess=EMPTY, asked=True)
        return _Generation(self.made, job, length, self.now)

    def plan(self, generations: list[_Generation]) -> None:
        """Request trees for their next steps, or queue them."""
        for each in generations:
            sequence = each.job.sequence
            budget = {"plain": 0, "always": 255}.get(self.mode)
            if budget is None:
                budget = self.scheduler.budget(sequence)
            self.scheduler.budget_sent(sequence, budget)
            each.job.tree, each.ready_at = EMPTY, self.now
            if budget:
                each.ready_at, each.asked_at = inf, self.now
                self.requested.append(each)
        self.requested_at = self.now

    def draft(self) -> None:
        """Draft for all that have requested a tree, if the drafter was idle by now."""
        began = max(self.drafter_free, self.requested_at)
        if not self.requested or (self.drafter_free > self.now):
            return
        requested, self.requested = self.requested, []
        first = not all(each.opened for each in requested)
        took = self.costs.drafting * (1 + first + self.costs.batched * (len(requested) - 1))
        self.drafter_free = began + self.duration(took)
        ready = self.drafter_free + self.duration(self.costs.beside)
        for each in requested:
            each.opened, each.ready_at = True, ready
            self.latency += 0.1 * (ready - each.asked_at - self.latency)
            if self.accepted(each.number, each.got, self.random) is not None:
                each.job.tree = TokenTree.chain([1] * self.nodes, [0.8] * self.nodes)

    def step(self, here: list[_Generation]) -> None:
        jobs, trees = [each.job for each in here], [each.job.tree for each in here]
        away = len(self.running) - len(here)
        admitted = self.scheduler.admit(jobs, trees, len(here), CONTEXT * len(here), away)
        self.rounds += sum(len(tree) > 0 for tree in trees)
        began = self.now
        took = self.duration(1 + self.costs.token * (sum(map(len, admitted)) + len(here) - 1))
        beside = min(took, max(0.0, self.drafter_free - began))
        self.now += took + self.costs.contention * beside
        outputs: list[StepOutput] = []
        for each, tree in zip(here, admitted, strict=True):
            drafted = len(each.job.tree) > 0
            count = self.accepted(each.number, each.got, self.random) if drafted else 0
            count = min(count or 0, len(tree))
            outputs.append(StepOutput([1] * (count + 1), accepted=list(range(count))))
        self.scheduler.stepped(began * STEP, self.now * STEP, outputs)
        for each, output in zip(here, outputs, strict=True):
            emitted = len(output.tokens)
            each.left -= emitted
            each.got += emitted
            self.tokens[each.number % self.kinds] += emitted
            if each.left <= 0:
                self.scheduler.forget(each.job.sequence)
                self.seconds[each.number % self.kinds] += self.now - each.began
                new = self.begin(self.length)
                self.running[self.running.index(each)] = new
                here[here.index(each)] = new
        self.draft()  # what was requested before this step
        self.plan(here)

    def duration(self, steps: float) -> float:
        """A duration on a machine that varies."""
        slow = self.costs.slow if self.now // 500 % 2 else 1.0
        return steps * slow * self.random.uniform(1 - self.costs.noise, 1 + self.costs.noise)
