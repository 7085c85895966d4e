"""Hostile drafters. No output may depend on them, and no other stream may fail.

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
    GenerationInfo,
    Resources,
    TokenTree,
    Update,
)


class HostileSequence(DraftSequence):
    """Calls the drafter with its text, a seeded generator and the number of the round."""

    def __init__(self, drafter: Hostile, generation: GenerationInfo) -> None:
        self.text = list(generation.tokens)
        self.vocab_size = generation.vocab_size
        self.rounds = 0
        self._drafter = drafter

    def extend(self, update: Update) -> None:
        self.text.extend(update.tokens)

    def draft(self, budget: Budget) -> TokenTree:
        self.rounds += 1
        return self._drafter.tree(self, budget, random.Random(len(self.text)))


class Hostile(Drafter):
    """Base class."""

    max_nodes = 255

    @classmethod
    def load(cls, folder: Path | None, options: Mapping[str, str], resources: Resources) -> Hostile:
        return cls()

    def start(self, generation: GenerationInfo) -> HostileSequence:
        return HostileSequence(self, generation)

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
        raise NotImplementedError


class RandomTree(Hostile):
    """Random tokens under random parents, confidences too."""

    method: ClassVar[str] = "random-tree"

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
        return random_tree(budget.nodes, sequence.vocab_size, draws)


class AlwaysWrong(Hostile):
    """A confident chain of one token that does not occur in the text."""

    method: ClassVar[str] = "always-wrong"

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
        unseen = set(range(sequence.vocab_size)) - set(sequence.text)
        token = min(unseen, default=0)
        nodes = min(budget.nodes, budget.depth)
        return TokenTree((token,) * nodes, tuple(range(-1, nodes - 1)), (1.0,) * nodes)


class Duplicates(Hostile):
    """A few tokens, likely ones included, repeated among siblings."""

    method: ClassVar[str] = "duplicates"

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
        few = [*sequence.text[-3:], draws.randrange(sequence.vocab_size)]
        tokens = tuple(few[i % len(few)] for i in range(budget.nodes))
        parents = tuple(i // 8 - 1 for i in range(budget.nodes))
        return TokenTree(tokens, parents)


class Huge(Hostile):
    """255 nodes, and in every other round 10,000."""

    method: ClassVar[str] = "huge"

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
        return random_tree(255 if sequence.rounds % 2 else 10_000, sequence.vocab_size, draws)


class Changing(Hostile):
    """A different size each round: none, one, the budget, random."""

    method: ClassVar[str] = "changing"

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
        sizes = (0, 1, budget.nodes, draws.randint(0, budget.nodes))
        return random_tree(sizes[sequence.rounds % 4], sequence.vocab_size, draws)


class Malformed(Hostile):
    """Trees that a verifier must refuse: cycles, forward parents, lengths, NaN, invalid tokens."""

    method: ClassVar[str] = "malformed"

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
        return (
            TokenTree((1, 2), (0, 0)),
            TokenTree((1, 2), (1, -1)),
            TokenTree((1, 2), (-2, 0)),
            TokenTree((1, 2), (-1,)),
            TokenTree((1,), (-1, 0)),
            TokenTree((1, 2), (-1, 0), (0.5,)),
            TokenTree((1, 2), (-1, 0), (0.5, float("nan"))),
            TokenTree((1, 2), (-1, 0), (2.0, -1.0)),
            TokenTree((sequence.vocab_size, 2), (-1, 0)),
        )[sequence.rounds % 9]


class Failing(Hostile):
    """Raises in every other round."""

    method: ClassVar[str] = "failing"

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
        if sequence.rounds % 2 == 0:
            raise RuntimeError("a drafter that fails")
        return random_tree(budget.nodes, sequence.vocab_size, draws)


class Raising(Hostile):
    """Raises in every round."""

    method: ClassVar[str] = "raising"

    def tree(self, sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
        raise RuntimeError("a drafter that always fails")


def random_tree(nodes: int, vocab_size: int, draws: random.Random) -> TokenTree:
    """A valid tree of any size, perhaps with duplicate siblings."""
    return TokenTree(
        tuple(draws.randrange(vocab_size) for _ in range(nodes)),
        tuple(draws.randrange(-1, i) for i in range(nodes)),
        tuple(draws.random() for _ in range(nodes)),
    )


METHODS = {kind.method: f"{__name__}:{kind.__name__}" for kind in Hostile.__subclasses__()}
"""Import paths by name, for `test_methods`."""
