"""Drafting methods of tests: hostile ones, a replayed text, and one that reads the target's KV.

No output may depend on a hostile drafter, and no other stream may fail. Entry points register the
methods: in this process those that conftest.py writes, in other processes those of
``test_methods-1.dist-info``, with this folder in PYTHONPATH.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from paceline.drafter import (
    Budget,
    Drafter,
    DraftSequence,
    GenerationInfo,
    Needs,
    Resources,
    TokenTree,
    Update,
)
from paceline.drafter.kv.mapped import SharedKv
from paceline.drafter.methods.base import parse_options


class WithoutFolder(Drafter):
    """Base class of methods that have neither weights nor options."""

    @classmethod
    def load(cls, folder: Path | None, options: Mapping[str, str], resources: Resources) -> Drafter:
        return cls()


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


class Hostile(WithoutFolder):
    """A drafter whose trees a function draws."""

    max_nodes = 255
    tree: Callable[[HostileSequence, Budget, random.Random], TokenTree]

    def start(self, generation: GenerationInfo) -> HostileSequence:
        return HostileSequence(self, generation)


def hostile(tree: Callable[[HostileSequence, Budget, random.Random], TokenTree]) -> type[Hostile]:
    """Return the drafter of a function, whose name is the method's."""
    name = tree.__name__
    members = {"method": name.replace("_", "-"), "tree": staticmethod(tree)}
    made: Any = type(name, (Hostile,), members)
    return made  # type: ignore[no-any-return]


def any_tree(nodes: int, vocab_size: int, draws: random.Random) -> TokenTree:
    """A valid tree of any size, perhaps with duplicate siblings."""
    return TokenTree(
        tuple(draws.randrange(vocab_size) for _ in range(nodes)),
        tuple(draws.randrange(-1, i) for i in range(nodes)),
        tuple(draws.random() for _ in range(nodes)),
    )


@hostile
def random_tree(sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
    """Random tokens under random parents, confidences too."""
    return any_tree(budget.nodes, sequence.vocab_size, draws)


@hostile
def always_wrong(sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
    """A confident chain of one token that does not occur in the text."""
    token = min(set(range(sequence.vocab_size)) - set(sequence.text), default=0)
    nodes = min(budget.nodes, budget.depth)
    return TokenTree((token,) * nodes, tuple(range(-1, nodes - 1)), (1.0,) * nodes)


@hostile
def duplicates(sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
    """A few tokens, likely ones included, repeated among siblings."""
    few = [*sequence.text[-3:], draws.randrange(sequence.vocab_size)]
    tokens = tuple(few[i % len(few)] for i in range(budget.nodes))
    return TokenTree(tokens, tuple(i // 8 - 1 for i in range(budget.nodes)))


@hostile
def huge(sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
    """255 nodes, and in every other round 10,000."""
    return any_tree(255 if sequence.rounds % 2 else 10_000, sequence.vocab_size, draws)


@hostile
def changing(sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
    """A different size each round: none, one, the budget, random."""
    sizes = (0, 1, budget.nodes, draws.randint(0, budget.nodes))
    return any_tree(sizes[sequence.rounds % 4], sequence.vocab_size, draws)


@hostile
def malformed(sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
    """Trees that a verifier must refuse: cycles, forward parents, lengths, NaN, invalid tokens."""
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


@hostile
def failing(sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
    """Raises in every other round."""
    if sequence.rounds % 2 == 0:
        raise RuntimeError("a drafter that fails")
    return any_tree(budget.nodes, sequence.vocab_size, draws)


@hostile
def raising(sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
    """Raises in every round."""
    raise RuntimeError("a drafter that always fails")


@hostile
def silent(sequence: HostileSequence, budget: Budget, draws: random.Random) -> TokenTree:
    """Drafts nothing."""
    return TokenTree((), ())


@dataclass(frozen=True)
class ReplayOptions:
    """Options of ``replay``: the probability, and the most nodes of a chain."""

    p: float = 0.8
    max_nodes: int = 8


class ReplaySequence(DraftSequence):
    """A generation of a recorded text."""

    def __init__(self, drafter: ReplayDrafter, generation: GenerationInfo) -> None:
        self._drafter = drafter
        self._vocab_size = generation.vocab_size
        prompt = tuple(generation.tokens[: generation.prompt_length])
        self._record = drafter.records.get(prompt, ())
        self._emitted = len(generation.tokens) - len(prompt)

    def extend(self, update: Update) -> None:
        self._emitted += len(update.tokens)

    def draft(self, budget: Budget) -> TokenTree:
        nodes = min(budget.nodes, budget.depth, self._drafter.max_nodes)
        tokens = list(self._record[self._emitted : self._emitted + nodes])
        for level in range(len(tokens)):
            if random.Random(self._emitted + level).random() >= self._drafter.p:
                tokens[level] = (tokens[level] + 1) % self._vocab_size
        return TokenTree.chain(tokens)


class ReplayDrafter(Drafter):
    """Chains of a recorded continuation, each token right with a probability.

    Needs a file with a line of JSON for each text: its prompt and its tokens.
    """

    method: ClassVar[str] = "replay"

    def __init__(
        self, options: ReplayOptions, records: Mapping[tuple[int, ...], tuple[int, ...]]
    ) -> None:
        self.p, self.max_nodes, self.records = options.p, options.max_nodes, records

    @classmethod
    def load(cls, folder: Path | None, options: Mapping[str, str], resources: Resources) -> Drafter:
        assert folder is not None
        texts = map(json.loads, folder.read_text().splitlines())
        records = {tuple(text["prompt"]): tuple(text["tokens"]) for text in texts}
        return cls(parse_options(ReplayOptions, options), records)

    def start(self, generation: GenerationInfo) -> ReplaySequence:
        return ReplaySequence(self, generation)


class KvSequence(DraftSequence):
    """Repeats the token after the committed position whose last key is nearest the newest one."""

    def __init__(self, kv: SharedKv, generation: GenerationInfo) -> None:
        self._kv = kv
        self._text = list(generation.tokens)

    def extend(self, update: Update) -> None:
        self._text += update.tokens

    def draft(self, budget: Budget) -> TokenTree:
        committed = min(self._kv.committed, len(self._text) - 1)
        assert committed >= 2
        near = 0.0
        for layer in KvReader.needs.kv_layers:
            keys, values = (plane[:, :committed] for plane in self._kv.layer(layer))
            near = near + (keys @ keys[:, -1:].mT).sum(0) + (values @ values[:, -1:].mT).sum(0)
        guess = self._text[int(near[:-1].argmax()) + 1]
        self._kv.check()
        return TokenTree((guess,), (-1,))


class KvReader(WithoutFolder):
    """Needs the first and the last layer."""

    method: ClassVar[str] = "kv-reader"
    needs = Needs(kv_layers=(0, -1))

    def start(self, generation: GenerationInfo) -> KvSequence:
        assert generation.kv is not None
        return KvSequence(generation.kv, generation)


METHODS = {
    kind.method: f"{__name__}:{kind.__name__}"
    for kind in (*Hostile.__subclasses__(), ReplayDrafter, KvReader)
}  # import paths by name, for `test_methods`
