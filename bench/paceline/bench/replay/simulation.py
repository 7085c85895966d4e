"""A simulated verifier: the scheduler decides, a virtual clock counts.

Nothing here depends on the speed of the machine that runs it: a :class:`Load` says how long
everything takes and what is drafted and accepted, from a trace or by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from paceline.text import Text
from paceline.tree import EMPTY, TokenTree
from paceline.verifier.engine.report import StepOutput
from paceline.verifier.scheduler.costs import CostTable
from paceline.verifier.scheduler.scheduler import Scheduler

# No drafter; a draft in every round, whose nodes are admitted; the controller decides.
MODES = ("plain", "always", "scheduled")


@dataclass
class Generation:
    """A simulated generation."""

    number: int  # its number, from 1 on
    job: Any  # what the scheduler knows of it
    length: int  # tokens to emit in all
    began: float  # when it began. Unit: seconds.
    got: int = 0  # tokens so far
    ready_at: float = 0.0  # when its next step may begin. Unit: seconds.
    asked_at: float = 0.0  # when its tree was requested. Unit: seconds.
    opened: bool = False  # whether a tree was requested before


class Load(Protocol):
    """What is drafted and accepted, and how long it takes. Unit of all times: seconds."""

    table: CostTable  # what the scheduler knows of steps before it has seen any
    asked: bool  # whether trees come from a drafter service; if not, they are the verifier's own

    def length(self, number: int) -> int | None:
        """Return the tokens of a generation; None if there is none: its user has ended."""

    def context(self, generation: Generation) -> int:
        """Return KV tokens behind which its next step runs."""

    def tree(self, generation: Generation) -> TokenTree:
        """Return the tree for its next step; empty if nothing is proposed."""

    def accepted(self, generation: Generation, tree: TokenTree) -> int:
        """Return accepted nodes of a tree that may have been cut."""

    def draft_seconds(self, drafted: Sequence[Generation]) -> float:
        """Return the time of a draft for several generations."""

    def beside_seconds(self, generation: Generation) -> float:
        """Return the time of messages and of waking up, in a round that asked a drafter."""

    def step_seconds(
        self, here: Sequence[Generation], trees: Sequence[TokenTree], drafting: float
    ) -> float:
        """Return the time of a step, beside which a drafter works for ``drafting`` seconds."""


@dataclass(eq=False)
class _Job:
    """What the scheduler reads of a text that is drafted for."""

    text: Text
    drafted_by: str | None
    asked: bool
    tree: TokenTree = EMPTY
    guess: TokenTree = EMPTY


@dataclass
class Simulation:
    """A verifier under a closed load: a generation that ends is followed by another one."""

    load: Load  # what is drafted and accepted, and how long it takes
    users: int  # generations at a time
    mode: str  # one of `MODES`
    # Tokens of each generation and the seconds that they took, since the last call of `run`.
    spent: dict[int, tuple[int, float]] = field(default_factory=dict)
    rounds: int = 0  # rounds with trees so far

    def __post_init__(self) -> None:
        self.now = self._drafter_free = self._requested_at = self._latency = 0.0
        self._requested: list[Generation] = []
        self.scheduler = Scheduler(self.load.table, 255, clock=lambda: self.now)
        self._made = 0
        self._running: list[Generation] = []
        for index in range(self.users):
            if (generation := self._begin()) is not None:
                # The first generations differ in length, or all would end at the same time.
                generation.length = max(1, generation.length * (index + 1) // self.users)
                self._running.append(generation)
        self._plan(self._running)

    def run(self, seconds: float = inf) -> dict[int, tuple[int, float]]:
        """Go on for so long, or until the load has no more generations; returns ``spent``."""
        self.spent.clear()
        end = self.now + seconds
        for generation in self._running:
            generation.began = self.now
            self.spent[generation.number] = (0, 0.0)
        while self.now < end and self._running:
            self._draft()
            here = [generation for generation in self._running if generation.ready_at <= self.now]
            away = [generation for generation in self._running if generation not in here]
            arrivals = [generation.asked_at + 1.3 * self._latency for generation in away]
            held = self.scheduler.hold(len(here), arrivals) if here else inf
            if held:
                free = self._drafter_free if self._requested else inf
                self.now = min(free, self.now + held, *(generation.ready_at for generation in away))
            else:
                self._step(here)
        for generation in self._running:
            self._spend(generation, 0, self.now - generation.began)
        return self.spent

    def _spend(self, generation: Generation, tokens: int, seconds: float) -> None:
        had, took = self.spent.get(generation.number, (0, 0.0))
        self.spent[generation.number] = (had + tokens, took + seconds)

    def _begin(self) -> Generation | None:
        length = self.load.length(self._made + 1)
        if length is None:
            return None
        self._made += 1
        drafter = None if self.mode == "plain" else "some"
        job = _Job(Text([0]), drafter, asked=self.load.asked)
        return Generation(self._made, job, length, self.now)

    def _plan(self, generations: Sequence[Generation]) -> None:
        """Request trees for their next steps, or queue them."""
        for generation in generations:
            generation.job.tree, generation.ready_at = EMPTY, self.now
            if not self.load.asked:
                if self.mode == "always" or (self.mode != "plain" and self.scheduler.measured):
                    generation.job.tree = self.load.tree(generation)
                self.scheduler.budget_sent(generation.job, 0)
                continue
            budget = {"plain": 0, "always": 255}.get(self.mode)
            if budget is None:
                budget = self.scheduler.budget(generation.job)
            self.scheduler.budget_sent(generation.job, budget)
            if budget:
                generation.ready_at, generation.asked_at = inf, self.now
                self._requested.append(generation)
        self._requested_at = self.now

    def _draft(self) -> None:
        """Draft for all that have requested a tree, if the drafter was idle by now."""
        began = max(self._drafter_free, self._requested_at)
        if not self._requested or self._drafter_free > self.now:
            return
        requested, self._requested = self._requested, []
        self._drafter_free = began + self.load.draft_seconds(requested)
        for generation in requested:
            generation.opened = True
            generation.ready_at = self._drafter_free + self.load.beside_seconds(generation)
            self._latency += 0.1 * (generation.ready_at - generation.asked_at - self._latency)
            generation.job.tree = self.load.tree(generation)

    def _step(self, here: list[Generation]) -> None:
        jobs = [generation.job for generation in here]
        trees = [job.tree for job in jobs]
        away = len(self._running) - len(here)
        attended = sum(self.load.context(generation) for generation in here)
        admitted = self.scheduler.admit(jobs, trees, len(here), attended, away)
        self.rounds += sum(len(tree) > 0 for tree in trees)
        began = self.now
        beside = max(0.0, self._drafter_free - began)
        self.now += self.load.step_seconds(here, admitted, beside)
        outputs: list[StepOutput] = []
        for generation, tree in zip(here, admitted, strict=True):
            count = self.load.accepted(generation, tree) if len(tree) else 0
            generation.job.tree = tree
            outputs.append(StepOutput([1] * (count + 1), accepted=list(range(count))))
        self.scheduler.stepped(began, self.now, outputs)
        going: list[Generation] = []
        for generation, output in zip(here, outputs, strict=True):
            generation.got += len(output.tokens)
            self._spend(generation, len(output.tokens), 0.0)
            if generation.got < generation.length:
                going.append(generation)
                continue
            self.scheduler.forget(generation.job.text)
            self._spend(generation, 0, self.now - generation.began)
            place, new = self._running.index(generation), self._begin()
            if new is None:
                del self._running[place]
            else:
                self._running[place] = new
                going.append(new)
        self._draft()  # what was requested before this step
        self._plan(going)
