"""Many generations on a simulated verifier: the scheduler decides, a virtual clock counts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from paceline.tree import TokenTree
from paceline.verifier.engine.output import StepOutput
from paceline.verifier.scheduler import scheduler as module
from paceline.verifier.scheduler.admission import Step
from paceline.verifier.scheduler.costs import CostTable
from paceline.verifier.scheduler.scheduler import Scheduler, Served

STEP = 0.005
"""Seconds that a plain step of one sequence takes; everything else is told in such steps."""

CONTEXT, RUN, WAITING_RUN = 200, 64, 4
MODES = ("plain", "fixed", "scheduled")
Accepted = Callable[[int, int, random.Random], int | None]
"""Drafted tokens that stand in a round of a user, by its number and how many tokens it has got;
None: there is no tree."""


@dataclass
class Costs:
    """What things take.

    Attributes:
        token: A token more in a step.
        drafting: From an answer to the tree that follows.
        disturbance: What steps take longer while somebody drafts.
        turn: From the end of a free run to the next.
        noise: Part that step times vary by.
    """

    token: float = 0.02
    drafting: float = 0.5
    disturbance: float = 0.2
    turn: float = 0.2
    noise: float = 0.1


class _Sequence(SimpleNamespace):
    """What the scheduler looks at of one."""

    __hash__ = object.__hash__


@dataclass
class User:
    """One sequence, and what its client is about to do.

    Attributes:
        number: Which generation it is, of all.
        sequence: What the scheduler knows it by.
        left: Tokens still to emit.
        got: Tokens it has got.
        budget: What it was told.
        back_at: When its next round comes.
        steps: Steps of that round.
        tree: Whether it brings a tree.
        attached: Whether it asked its drafter before.
    """

    number: int
    sequence: Any
    left: int
    got: int = 0
    budget: int = 0
    back_at: float = 0.0
    steps: int = 0
    tree: bool = False
    attached: bool = False


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
        table = CostTable((1, top), (1, 2048), ((STEP, STEP), (longest, longest)))
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
                here = [user for user in people if user.back_at <= self._now]
                if here:
                    tokens += self._step(people, here)
                else:
                    self._now = min(user.back_at for user in people)
                people = [self._begin(self.length) if u.left <= 0 else u for u in people]
        return tokens / time

    def _begin(self, length: int) -> User:
        self._made += 1
        drafter = None if self.mode == "plain" else "some"
        sampling = SimpleNamespace(rejection=False)
        generation = SimpleNamespace(sampling=sampling)
        sequence = _Sequence(drafter=drafter, committed=CONTEXT, generation=generation)
        user = User(self._made, sequence, length)
        self._tell(user, self._scheduler.budget(sequence))
        return user

    def _tell(self, user: User, budget: int) -> None:
        """The client is answered, and makes its next round."""
        user.budget = {"plain": 0, "fixed": 255, "scheduled": budget}[self.mode]
        self._scheduler.budget_sent(user.sequence, user.budget)
        if user.budget:
            asked = self.costs.drafting * (1 if user.attached else 2)
            user.attached = True
            user.tree = self.accepted(user.number, user.got, self._chance) is not None
            user.back_at, user.steps = self._now + asked, 1 if user.tree else WAITING_RUN
        else:
            user.back_at, user.tree, user.steps = self._now + self.costs.turn, False, RUN

    def _step(self, people: list[User], here: list[User]) -> int:
        """One step; the tokens it emits."""
        trees = [_tree(self.nodes if user.tree else 0) for user in here]
        rounds: Any = [
            SimpleNamespace(sequence=user.sequence, tree=tree)
            for user, tree in zip(here, trees, strict=True)
        ]
        step = Step(len(here), CONTEXT * len(here), len(here))
        checked = self._scheduler.admit(rounds, trees, step)
        if self.mode != "scheduled":
            checked = trees
        self.drafted += sum(len(tree) > 0 for tree in trees)
        busy = any(user.budget for user in people if user not in here or user.tree)
        took = (
            1
            + self.costs.token * (sum(map(len, checked)) + len(here) - 1)
            + self.costs.disturbance * busy
        )
        began = self._now
        self._now += took * self._chance.uniform(1 - self.costs.noise, 1 + self.costs.noise)
        served: list[Any] = []
        for user, round_, tree in zip(here, rounds, checked, strict=True):
            stood = self.accepted(user.number, user.got, self._chance) if user.tree else None
            stood = min(stood or 0, len(tree))
            output = StepOutput([1] * (stood + 1), accepted=list(range(stood)))
            served.append(Served(round_, tree, output))
        self._scheduler.stepped(began * STEP, self._now * STEP, served)
        for user, each in zip(here, served, strict=True):
            self._answer(user, len(each.output.tokens))
        return sum(len(each.output.tokens) for each in served)

    def _answer(self, user: User, emitted: int) -> None:
        user.left -= emitted
        user.got += emitted
        user.steps -= 1
        budget = self._scheduler.budget(user.sequence)
        if user.left <= 0:
            self._scheduler.forget(user.sequence)
        elif user.steps == 0 or (budget and self._scheduler.suspended(user.sequence)):
            self._tell(user, budget)


def _tree(nodes: int) -> TokenTree:
    return TokenTree.chain([1] * nodes, [0.8] * nodes)
