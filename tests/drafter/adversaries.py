"""Hostile drafters: none of them may change a token, or do more harm than cost time.

Entry points register them: in this process those that conftest.py writes, in other processes those
of ``test_methods-1.dist-info``, with this folder in PYTHONPATH.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from paceline.drafter import (
    Budget,
    Drafter,
    DraftSequence,
    Generation,
    Resources,
    Tree,
    Update,
)


class HostileSequence(DraftSequence):
    """Makes trees of the text, a seeded generator and the number of the round."""

    def __init__(self, drafter: Hostile, generation: Generation) -> None:
        self.text = list(generation.tokens)
        self.vocab_size = generation.vocab_size
        self.rounds = 0
        self._drafter = drafter

    def extend(self, update: Update) -> None:
        self.text.extend(update.tokens)

    def draft(self, budget: Budget) -> Tree:
        self.rounds += 1
        return self._drafter.tree(self, budget, random.Random(len(self.text)))


class Hostile(Drafter):
    """Shared parts."""

    inline: ClassVar[bool] = True
    max_nodes = 255

    @classmethod
    def load(cls, folder: Path | None, options: Mapping[str, str], resources: Resources) -> Hostile:
        return cls()

    def start(self, generation: Generation) -> HostileSequence:
        return HostileSequence(self, generation)

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> Tree:
        raise NotImplementedError


class RandomTree(Hostile):
    """Random tokens under random parents, confidences too."""

    method: ClassVar[str] = "random-tree"

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> Tree:
        return random_tree(budget.nodes, sequence.vocab_size, draws)


class AlwaysWrong(Hostile):
    """Sure of a chain of one token that the text does not hold."""

    method: ClassVar[str] = "always-wrong"

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> Tree:
        unseen = set(range(sequence.vocab_size)) - set(sequence.text)
        token = min(unseen, default=0)
        nodes = min(budget.nodes, budget.depth)
        return Tree((token,) * nodes, tuple(range(-1, nodes - 1)), (1.0,) * nodes)


class Duplicates(Hostile):
    """The same few tokens again and again among siblings, right ones included."""

    method: ClassVar[str] = "duplicates"

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> Tree:
        few = [*sequence.text[-3:], draws.randrange(sequence.vocab_size)]
        tokens = tuple(few[i % len(few)] for i in range(budget.nodes))
        parents = tuple(i // 8 - 1 for i in range(budget.nodes))
        return Tree(tokens, parents)


class Huge(Hostile):
    """As large as a round may be, and every other time far larger."""

    method: ClassVar[str] = "huge"

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> Tree:
        return random_tree(255 if sequence.rounds % 2 else 10_000, sequence.vocab_size, draws)


class Changing(Hostile):
    """Another size each round: none, one, the budget, anything between."""

    method: ClassVar[str] = "changing"

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> Tree:
        sizes = (0, 1, budget.nodes, draws.randint(0, budget.nodes))
        return random_tree(sizes[sequence.rounds % 4], sequence.vocab_size, draws)


class Malformed(Hostile):
    """Everything a verifier must refuse: cycles, forward parents, lengths, NaN, foreign tokens."""

    method: ClassVar[str] = "malformed"

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> Tree:
        return (
            Tree((1, 2), (0, 0)),
            Tree((1, 2), (1, -1)),
            Tree((1, 2), (-2, 0)),
            Tree((1, 2), (-1,)),
            Tree((1,), (-1, 0)),
            Tree((1, 2), (-1, 0), (0.5,)),
            Tree((1, 2), (-1, 0), (0.5, float("nan"))),
            Tree((1, 2), (-1, 0), (2.0, -1.0)),
            Tree((sequence.vocab_size, 2), (-1, 0)),
        )[sequence.rounds % 9]


class Failing(Hostile):
    """Raises every other time."""

    method: ClassVar[str] = "failing"

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> Tree:
        if sequence.rounds % 2 == 0:
            raise RuntimeError("a drafter that fails")
        return random_tree(budget.nodes, sequence.vocab_size, draws)


class FailingThread(Failing):
    """The same on the worker's thread."""

    inline: ClassVar[bool] = False
    method: ClassVar[str] = "failing-thread"


def random_tree(nodes: int, vocab_size: int, draws: random.Random) -> Tree:
    """A valid tree but for its size, perhaps with duplicate siblings."""
    return Tree(
        tuple(draws.randrange(vocab_size) for _ in range(nodes)),
        tuple(draws.randrange(-1, i) for i in range(nodes)),
        tuple(draws.random() for _ in range(nodes)),
    )


METHODS = {
    kind.method: f"{__name__}:{kind.__name__}"
    for kind in (
        RandomTree,
        AlwaysWrong,
        Duplicates,
        Huge,
        Changing,
        Malformed,
        Failing,
        FailingThread,
    )
}
"""Name to import path."""
