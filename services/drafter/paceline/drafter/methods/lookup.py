"""A model's drafter that looks up earlier text first: the option ``lookup`` of every method.

Where the text repeats itself, prompt lookup drafts longer paths than a model, and in microseconds.
A round is drafted by ``ngram`` alone if its tree has a larger expected accepted length
than the model's recent trees; otherwise the model drafts too, and the two trees become one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from paceline.drafter.kv import KvGone
from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    DraftSequence,
    GenerationInfo,
    Resources,
    Update,
)
from paceline.drafter.methods.ngram import NgramDrafter
from paceline.sampling import rejects
from paceline.tree import TokenTree, merge

_MEMORY = 0.9
"""Weight of the earlier trees in the mean of the model's expected accepted tokens."""


@dataclass(frozen=True)
class LookupOptions:
    """Options of every method for lookup."""

    lookup: bool = False
    """Whether ``ngram`` looks up earlier text before the model drafts."""


class LookupSequence(DraftSequence):
    """One generation of both drafters."""

    def __init__(self, drafter: LookupDrafter, generation: GenerationInfo) -> None:
        self.model = drafter.model.start(generation)
        self.lookup = drafter.lookup.start(generation)
        self.rejects = rejects(generation.sampling)
        self.expected = 0.0
        """Mean expected accepted length of the model's recent trees; 0: it has drafted none."""
        self._drafter = drafter

    @property
    def backlog(self) -> int:
        return max(self.lookup.backlog, self.model.backlog)

    def warm(self, limit: int) -> None:
        self.lookup.warm(limit)
        self.model.warm(limit)

    def extend(self, update: Update) -> None:
        self.lookup.extend(update)
        self.model.extend(update)

    def draft(self, budget: Budget) -> TokenTree:
        (tree,) = self._drafter.draft_many([(self, budget)])
        if isinstance(tree, KvGone):
            raise tree
        return tree

    def close(self) -> None:
        self.lookup.close()
        self.model.close()

    def needs_model(self, found: TokenTree) -> bool:
        """Whether the model may draft further than what was looked up."""
        return not self.expected or sum(found.survivals) < self.expected

    def take(self, tree: TokenTree) -> None:
        """Notes what a tree of the model promises."""
        promised = sum(tree.survivals)
        memory = _MEMORY if self.expected else 0.0
        self.expected = memory * self.expected + (1 - memory) * promised


class LookupDrafter(Drafter):
    """A drafter of another method, and ``ngram``."""

    method: ClassVar[str] = "lookup"

    def __init__(self, model: Drafter) -> None:
        """Takes over ``model``."""
        self.model = model
        self.lookup = NgramDrafter.load(None, {}, Resources())
        self.fit, self.needs, self.weight_bytes = model.fit, model.needs, model.weight_bytes
        self.max_nodes = max(model.max_nodes, self.lookup.max_nodes)
        self.max_depth = max(model.max_depth, self.lookup.max_depth)

    @classmethod
    def load(cls, folder: object, options: Mapping[str, str], resources: Resources) -> Drafter:
        raise NotImplementedError("the loader makes it from a drafter with the option lookup")

    def start(self, generation: GenerationInfo) -> LookupSequence:
        return LookupSequence(self, generation)

    def draft_many(
        self, rounds: Sequence[tuple[DraftSequence, Budget]]
    ) -> Sequence[TokenTree | KvGone]:
        """Looks up all rounds, then drafts those that need the model together."""
        own = cast(Sequence[tuple[LookupSequence, Budget]], rounds)
        trees = [sequence.lookup.draft(budget) for sequence, budget in own]
        found: list[TokenTree | KvGone] = [*trees]
        asked = [n for n, (each, _) in enumerate(own) if each.needs_model(trees[n])]
        drafted = self.model.draft_many([(own[n][0].model, own[n][1]) for n in asked])
        for number, tree in zip(asked, drafted, strict=True):
            sequence, budget = own[number]
            if isinstance(tree, KvGone):
                found[number] = tree
                continue
            sequence.take(tree)
            found[number] = (
                tree
                if tree.proposals
                else merge(trees[number], tree, nodes=budget.nodes, depth=budget.depth)
            )
        return found

    def draft_ahead(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        own = cast(Sequence[LookupSequence], sequences)
        owner = {id(each.model): each for each in own}
        going = self.model.draft_ahead([each.model for each in own])
        return [owner[id(each)] for each in going]

    def close(self) -> None:
        self.lookup.close()
        self.model.close()
