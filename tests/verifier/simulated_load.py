"""Many generations on a simulated verifier: the scheduler decides, a virtual clock counts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from paceline.tree import EMPTY, TokenTree
from paceline.verifier.engine.job import StepOutput
from paceline.verifier.scheduler import scheduler as module
from paceline.verifier.scheduler.costs import CostTable
from paceline.verifier.scheduler.scheduler import Scheduler

STEP = 0.005
"""Seconds that a plain step of one sequence takes; everything else is told in such steps."""

CONTEXT = 200
MODES = ("plain", "fixed", "scheduled")
Accepted = Callable[[int, int, random.Random], int | None]
"""Drafted tokens that stand in a round of a user, by its number and how many tokens it has got;
None: there is no tree."""


@dataclass
class Costs:
    """What things take.

    Attributes:
        token: A token more in a step.
        drafting: From a step to the tree that follows it; the first takes twice as long.
        disturbance: What steps take longer while somebody drafts.
        noise: Part that step times vary by.
    """

    token: float = 0.02
    drafting: float = 0.5
    disturbance: float = 0.2
    noise: float = 0.1


class _Sequence(SimpleNamespace):
    """What the scheduler looks at of one."""

    __hash__ = object.__hash__


@dataclass
class User:
    """One generation.

    Attributes:
        number: Its number, of all.
        job: What the scheduler knows of it.
        left: Tokens still to emit.
        got: Tokens it has got.
        ready_at: When it waits for its next step.
        asked: Whether a tree was requested for that step.
        opened: Whether one was requested before.
    """

    number: int
    job: Any
    left: int
    got: int = 0
    ready_at: float = 0.0
    asked: bool = False
    opened: bool = False


@dataclass
class Simulation:
    """A verifier under a closed load.

    Attributes:
        accepted: How good the drafter is.
        users: Generations at a time.
        mode: One of `MODES`.
        costs: What things take.
        nodes: Of a tree at most.
        length: Tokens of a generation.
    """

    accepted: Accepted
    users: int
    mode: str
    costs: Costs = field(default_factory=Costs)
    nodes: int = 8
    length: int = 128

    def __post_init__(self) -> None:
        top = 512
        longest = STEP * (1 + self.costs.token * (top - 1))
        table = CostTable((1, top), (STEP, longest))
        self._chance = random.Random(0)
        self._now = 1000.0
        with patch.object(module, "perf_counter", lambda: self._now * STEP):
            self._scheduler = Scheduler(table, 255)
        self._made = 0
        self.drafted = 0
        """Rounds with trees so far."""

    def run(self, time: float) -> float:
        """Tokens that come out in a plain step's time."""
        tokens, end = 0, self._now + time
        with patch.object(module, "perf_counter", lambda: self._now * STEP):
            # The first generations differ in length, or all would end at the same time.
            people = [
                self._begin(1 + self.length * index // self.users) for index in range(self.users)
            ]
            while self._now < end:
                here = [user for user in people if user.ready_at <= self._now]
                if here:
                    tokens += self._step(people, here)
                else:
                    self._now = min(user.ready_at for user in people)
                people = [self._begin(self.length) if u.left <= 0 else u for u in people]
        return tokens / time

    def _begin(self, length: int) -> User:
        self._made += 1
        drafter = None if self.mode == "plain" else "some"
        sampling = SimpleNamespace(rejection=False)
        generation = SimpleNamespace(sampling=sampling)
        sequence = _Sequence(drafter=drafter, committed=CONTEXT, generation=generation)
        user = User(self._made, SimpleNamespace(sequence=sequence, tree=EMPTY), length)
        self._plan(user)
        return user

    def _plan(self, user: User) -> None:
        """Request a tree for the next step, or not."""
        sequence = user.job.sequence
        budget = self._scheduler.budget(sequence) if self.mode == "scheduled" else 0
        nodes = {"plain": 0, "fixed": 255, "scheduled": budget}[self.mode]
        self._scheduler.budget_sent(sequence, nodes)
        user.asked, user.job.tree, user.ready_at = nodes > 0, EMPTY, self._now
        if user.asked:
            user.ready_at += self.costs.drafting * (1 if user.opened else 2)
            user.opened = True
            if self.accepted(user.number, user.got, self._chance) is not None:
                user.job.tree = TokenTree.chain([1] * self.nodes, [0.8] * self.nodes)

    def _step(self, people: list[User], here: list[User]) -> int:
        """One step; the tokens it emits."""
        jobs, trees = [user.job for user in here], [user.job.tree for user in here]
        away = sum(user.asked for user in people if user.ready_at > self._now)
        checked = self._scheduler.admit(jobs, trees, len(here), CONTEXT * len(here), away)
        if self.mode != "scheduled":
            checked = trees
        self.drafted += sum(len(tree) > 0 for tree in trees)
        busy = any(user.asked for user in people if user not in here or len(user.job.tree))
        took = (
            1
            + self.costs.token * (sum(map(len, checked)) + len(here) - 1)
            + self.costs.disturbance * busy
        )
        began = self._now
        self._now += took * self._chance.uniform(1 - self.costs.noise, 1 + self.costs.noise)
        outputs: list[StepOutput] = []
        for user, tree in zip(here, checked, strict=True):
            drafted = len(user.job.tree) > 0
            stood = self.accepted(user.number, user.got, self._chance) if drafted else None
            stood = min(stood or 0, len(tree))
            outputs.append(StepOutput([1] * (stood + 1), accepted=list(range(stood))))
        self._scheduler.stepped(began * STEP, self._now * STEP, outputs)
        for user, output in zip(here, outputs, strict=True):
            user.left -= len(output.tokens)
            user.got += len(output.tokens)
            if user.left > 0:
                self._plan(user)
            else:
                self._scheduler.forget(user.job.sequence)
        return sum(len(output.tokens) for output in outputs)
