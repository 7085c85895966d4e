"""Drafters with a model, whose sequences grow their trees together."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from torch import Tensor

from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    DraftSequence,
    Fit,
    Generation,
    Update,
)
from paceline.drafter.methods.beam import Beam, BeamOptions, Chain
from paceline.drafter.methods.ranking import Ranked, Ranker
from paceline.kernels import MAX_TREE_NODES
from paceline.service.sampling import sampling_params
from paceline.tree import EMPTY, TokenTree

Source = TypeVar("Source")


def required(source: Source | None, method: str, what: str) -> Source:
    """Returns the target's data of a generation.

    Raises:
        ValueError: The generation comes without it.
    """
    if source is None:
        raise ValueError(
            f"{method} reads the target's {what}, but the generation has none; attach with "
            "read_grant and verifier_address"
        )
    return source


class ModelShape(Protocol):
    """What a beam needs of a model's configuration."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position(self) -> int: ...


class BeamSequence(DraftSequence):
    """One generation of a :class:`BeamDrafter`.

    A subclass prepares a round in :meth:`prepare`, and takes the logits of each level.
    """

    def __init__(self, drafter: BeamDrafter[Any], generation: Generation) -> None:
        self.length = len(generation.tokens)
        """Tokens of the text."""
        self.beam: Beam | None = None
        """The tree of the newest round; None if there is none."""
        self._drafter = drafter
        self._ranker = Ranker(
            sampling_params(generation.sampling),
            prompt=generation.tokens[: generation.prompt_length],
            output=generation.tokens[generation.prompt_length :],
            vocab_size=min(generation.vocab_size, drafter.shape.vocab_size),
            candidates=drafter.options.candidates,
            drafted=drafter.drafted_tokens,
        )
        self._widths = self._ranker.widths(drafter.options.widths)

    def extend(self, update: Update) -> None:
        if update.tokens:
            self.beam = None
        self.length += len(update.tokens)
        self._ranker.extend(update.tokens)

    def draft(self, budget: Budget) -> TokenTree:
        return self._drafter.draft_many([(self, budget)])[0]

    def begin(self, budget: Budget) -> bool:
        """Starts the tree of a round. Returns False if nothing can be drafted."""
        self.beam = None
        drafter = self._drafter
        depth = min(budget.depth, drafter.max_depth, drafter.shape.max_position - self.length + 1)
        if budget.nodes <= 0 or depth <= 0:
            return False
        drafted = self.take_drafted()
        if drafted is None and not self.prepare():
            return False
        limits = Budget(min(budget.nodes, drafter.max_nodes), depth)
        self.beam = Beam(limits, self._widths, drafter.options.min_survival, drafted)
        return True

    def take_drafted(self) -> Chain | None:
        """Returns what was drafted ahead and became the text's continuation; None: nothing."""
        return None

    def begin_ahead(self) -> bool:
        """Gets ready for a level beyond the tree. Returns False if it cannot be drafted."""
        return False

    @abstractmethod
    def prepare(self) -> bool:
        """Gets ready what the round reads. Returns False if the round cannot be drafted.

        Raises:
            KvGone: The cache whose KV or hidden states are read is gone.
        """

    @property
    def tree(self) -> Beam:
        """The tree of the round.

        Raises:
            RuntimeError: No round has begun.
        """
        if self.beam is None:
            raise RuntimeError("this sequence has no tree; call begin first")
        return self.beam

    def rank(self, logits: Tensor) -> Ranked:
        """Ranks the children of the frontier's nodes from their logits ``[frontier, V]``."""
        beam = self.tree
        position = self.length + beam.level
        return self._ranker.rank(logits, position, beam.frontier_tokens(), beam.width)

    def finish(self) -> None:
        """Ends the round.

        Raises:
            KvGone: The cache was released while it was read.
        """

    def close(self) -> None:
        self.beam = None


S = TypeVar("S", bound=BeamSequence)


class BeamDrafter(Drafter, Generic[S]):
    """A drafter whose sequences share every forward pass of a round.

    All but :meth:`start` runs on one thread at a time.
    """

    def __init__(self, shape: ModelShape, options: BeamOptions, fit: Fit, size: int) -> None:
        """Sets what the interface describes.

        Args:
            shape: Configuration of the model.
            options: Options of the method.
            fit: Targets that the drafter fits.
            size: Bytes of weights that this process holds for it alone.
        """
        self.shape = shape
        self.options = options
        self.fit = fit
        self.max_nodes = min(options.max_nodes or MAX_TREE_NODES - 1, options.drafted)
        self.max_depth = options.levels
        self.weight_bytes = size
        self.drafted_tokens: Tensor | None = None
        """The target's token id of each logit, rising, int64 ``[R]`` on the CPU; None: all ids."""

    def draft_many(self, rounds: Sequence[tuple[DraftSequence, Budget]]) -> list[TokenTree]:
        """Grows one tree for each round, level by level.

        A tree gets no further level that would probably end after its deadline. The estimate for a
        level is the duration of the one before.
        """
        own = cast(Sequence[tuple[S, Budget]], rounds)
        growing = [
            (sequence, budget)
            for sequence, budget in own
            if sequence.begin(budget) and sequence.tree.grows
        ]
        while growing:
            begun = time.monotonic()
            self.grow_level([sequence for sequence, _ in growing])
            now = time.monotonic()
            next_end = now + (now - begun)
            growing = [
                (sequence, budget)
                for sequence, budget in growing
                if sequence.tree.grows and next_end < budget.deadline
            ]
        trees = [s.beam.tree() if s.beam is not None else EMPTY for s, _ in own]
        for sequence, _ in own:
            sequence.finish()
        return trees

    def draft_ahead(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        going = [each for each in cast(Sequence[S], sequences) if each.begin_ahead()]
        if going:
            self.grow_level(going)
        return list(going)

    @abstractmethod
    def grow_level(self, growing: Sequence[S]) -> None:
        """Adds one level to the tree of each sequence, by one forward pass over all frontiers."""
