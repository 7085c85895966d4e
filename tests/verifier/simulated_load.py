"""Simulated drafters, texts and machines, by chance. Times are in plain steps of one sequence."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.bench.replay.simulation import Generation, Simulation
from paceline.tree import EMPTY, TokenTree
from paceline.verifier.scheduler.costs import CostTable

STEP = 0.005  # duration of a plain step of one sequence, in seconds
CONTEXT = 200
_NODES = 8

Accepted = Callable[[int, int, random.Random], int | None]
"""Number of drafted tokens that are accepted, by the number of the generation and its number of
tokens so far; None: the tree is empty."""


@dataclass(frozen=True)
class Costs:
    """Durations. Unit: plain steps of one sequence."""

    token: float = 0.06  # one more row of a step
    drafting: float = 0.5  # a draft of one sequence; the first of a sequence takes twice as long
    batched: float = 0.1  # one more sequence in the same draft, as a part of ``drafting``
    beside: float = 0.15  # messages and waking up, in each drafted round
    contention: float = 0.5  # by how much a step is longer for each unit of draft beside it
    noise: float = 0.1  # part by which durations vary
    slow: float = 1.0  # factor of all durations in every second phase of 500 steps


class ByChance:
    """A load whose texts, drafts and durations are drawn."""

    asked = True

    def __init__(self, accepted: Accepted, costs: Costs, length: int) -> None:
        self._accepted, self._costs, self._length = accepted, costs, length
        self._random = random.Random(0)
        self._passed = 0.0
        longest = STEP * (1 + costs.token * 511)
        self.table = CostTable((1, 512), (STEP, longest))

    def length(self, number: int) -> int:
        return self._length

    def context(self, each: Generation) -> int:
        return CONTEXT

    def tree(self, each: Generation) -> TokenTree:
        if self._accepted(each.number, each.got, self._random) is None:
            return EMPTY
        return TokenTree.chain([1] * _NODES, [0.8] * _NODES)

    def accepted(self, each: Generation, tree: TokenTree) -> int:
        return min(self._accepted(each.number, each.got, self._random) or 0, len(tree))

    def draft_seconds(self, drafted: Sequence[Generation]) -> float:
        first = not all(each.opened for each in drafted)
        steps = self._costs.drafting * (1 + first + self._costs.batched * (len(drafted) - 1))
        return self._duration(steps)

    def beside_seconds(self, each: Generation) -> float:
        return self._duration(self._costs.beside)

    def step_seconds(
        self, here: Sequence[Generation], trees: Sequence[TokenTree], drafting: float
    ) -> float:
        rows = sum(map(len, trees)) + len(here)
        took = self._duration(1 + self._costs.token * (rows - 1))
        took += self._costs.contention * min(took, drafting)
        self._passed += took / STEP
        return took

    def _duration(self, steps: float) -> float:
        slow = self._costs.slow if self._passed // 500 % 2 else 1.0
        noise = self._costs.noise
        return STEP * steps * slow * self._random.uniform(1 - noise, 1 + noise)


class Drawn(Simulation):
    def __init__(
        self, accepted: Accepted, users: int, mode: str, costs: Costs | None = None, kinds: int = 1,
        length: int = 128,
    ) -> None:  # fmt: skip
        self._kinds = kinds
        super().__init__(ByChance(accepted, costs or Costs(), length), users, mode)

    def speeds(self, steps: float) -> dict[int, float]:
        """Go on for so many plain steps. Returns the tokens of a generation in the time of a plain
        step of one sequence, by kind: generations whose number has the same rest are of the same
        kind."""
        found: dict[int, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for number, (tokens, seconds) in self.run(steps * STEP).items():
            had, took = found[number % self._kinds]
            found[number % self._kinds] = had + tokens, took + seconds / STEP
        return {kind: found[kind][0] / found[kind][1] for kind in sorted(found)}
