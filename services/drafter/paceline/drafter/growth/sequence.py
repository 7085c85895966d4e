"""Generations whose trees grow by the passes of a model, and how a batch of them grows."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from paceline.drafter.generation import Budget, DraftSequence, GenerationInfo, Update
from paceline.drafter.growth.ranking import Ranker
from paceline.drafter.kv import KvGone
from paceline.kernels import CHUNK, MAX_TREE_NODES, QueryBlock, send
from paceline.kernels.structures import DraftText
from paceline.text import sampling_rules
from paceline.tree import EMPTY, TokenTree

if TYPE_CHECKING:
    from paceline.drafter.methods.options import TreeOptions

Source = TypeVar("Source")


def required(source: Source | None, method: str, what: str) -> Source:
    """Return the target's data of a generation. Raises ``ValueError`` if it comes without it."""
    if source is None:
        raise ValueError(
            f"{method} reads the target's {what}, but the generation has none; open it "
            "with a read_grant"
        )
    return source


def chain_blocks(index: int, begin: int, end: int) -> list[QueryBlock]:
    """Return positions ``begin`` to ``end`` of cache ``index``, cut at multiples of ``CHUNK``.

    With these cuts the bits of their KV do not depend on how a text is split over forward passes.
    """
    blocks = []
    while begin < end:
        stop = min(end, (begin // CHUNK + 1) * CHUNK)
        blocks.append(QueryBlock(index, begin, None, stop - begin))
        begin = stop
    return blocks


@dataclass(frozen=True)
class PassPart:
    """One generation's tokens in a forward pass, whose last one needs logits."""

    tokens: Sequence[int]  # token ids
    positions: Sequence[int]  # absolute position of each
    blocks: list[QueryBlock]  # cache slots of their KV


class ModelShape(Protocol):
    """The part of a model's configuration that its trees depend on."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def max_position(self) -> int:
        """Positions that the model knows."""


@dataclass(frozen=True)
class TreeSettings:
    """What the trees of all texts of a drafter have in common."""

    options: TreeOptions  # widths, depth and limits
    vocab_size: int  # number of token ids of the model
    max_position: int  # positions that the model knows
    device: torch.device  # device of the model
    # The target's token id of each logit, rising, int64 `[R]` on the CPU; None if all ids have one.
    drafted: Tensor | None = None
    drafted_on_device: Tensor | None = None  # the same on the device, if that is another one

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        options: TreeOptions,
        device: torch.device | None = None,
        drafted: Tensor | None = None,
    ) -> TreeSettings:
        """Return the settings for a model of a shape; ``drafted`` as above."""
        device = device or torch.device("cpu")
        copied = None if drafted is None else send(drafted, device)
        return cls(options, shape.vocab_size, shape.max_position, device, drafted, copied)

    @property
    def max_nodes(self) -> int:
        return min(self.options.max_nodes or MAX_TREE_NODES - 1, self.options.drafted)

    @property
    def max_depth(self) -> int:
        """Maximum depth. Unit: tokens."""
        return self.options.levels

    @property
    def logits(self) -> int:
        """Number of logits of the model."""
        return self.vocab_size if self.drafted is None else len(self.drafted)


class TreeDrafter(Protocol):
    """What sequences read of their drafter."""

    settings: TreeSettings
    growth: Any  # its :class:`TreeGrowth`


class GrownSequence(DraftSequence):
    """A generation whose trees grow by the passes of a model.

    A round begins with :meth:`prepare`. The tree then grows in the sequence's :attr:`way`, which
    calls :meth:`keep` when the passes have run. A round ends with :meth:`finish`.
    """

    def __init__(
        self, drafter: TreeDrafter, generation: GenerationInfo, kept: int | None = None
    ) -> None:
        """Start a text that keeps this many of its newest tokens; None for all."""
        tokens, settings = generation.tokens, drafter.settings
        self._settings, self._growth = settings, drafter.growth
        self.tokens: list[int] | deque[int] = list(tokens) if kept is None else deque(tokens, kept)
        self.length = len(tokens)  # tokens of the text, those that are not kept included
        self.ranker = Ranker(
            sampling_rules(generation.sampling),
            prompt=tokens[: generation.prompt_length],
            output=tokens[generation.prompt_length :],
            vocab_size=min(generation.vocab_size, settings.vocab_size),
            candidates=settings.options.candidates,
            drafted=settings.drafted,
            drafted_on_device=settings.drafted_on_device,
        )
        self.native: DraftText | None = None  # the text for native drafts, if its trees grow so
        self.way: Growth = drafter.growth.way_of(self)

    def extend(self, update: Update) -> None:
        self.tokens.extend(update.tokens)
        self.length += len(update.tokens)
        self.ranker.extend(update.tokens)

    def draft(self, budget: Budget) -> TokenTree:
        (tree,) = self._growth.draft_many([(self, budget)])
        if isinstance(tree, KvGone):
            raise tree
        return cast(TokenTree, tree)

    def begin(self, budget: Budget) -> Budget | None:
        """Begin a round. Returns the limits of its tree; None if nothing can be drafted. Raises
        ``KvGone`` if the cache whose KV or hidden states are read is gone."""
        settings = self._settings
        depth = min(budget.depth, settings.max_depth, settings.max_position - self.length + 1)
        nodes = min(budget.nodes, settings.max_nodes)
        if nodes <= 0 or depth <= 0 or not self.prepare():
            return None
        late = time.monotonic() >= budget.deadline
        return Budget(nodes, 1 if late else depth, budget.deadline)

    @abstractmethod
    def prepare(self) -> bool:
        """Get ready what the round reads. Returns False if the round cannot be drafted. Raises
        ``KvGone`` if the cache whose KV or hidden states are read is gone."""

    def fill(self, text: DraftText) -> None:
        """Set the fields of a text that differ from one native call to the next."""

    def keep(self) -> None:
        """Count what the passes of the round wrote of the text."""

    def finish(self) -> None:
        """End the round. Raises ``KvGone`` if the cache was released while it was read."""

    def newest(self, begin: int, end: int) -> list[int]:
        """Return the tokens at positions ``begin`` to ``end``, all among those that are kept."""
        return [self.tokens[at - self.length] for at in range(begin, end)]

    def text_part(self, index: int, begin: int, end: int, slot: int) -> PassPart:
        """Return positions ``begin`` to ``end`` of the text, to be fed.

        ``index`` is the number of the text's cache in the pass, ``slot`` holds the first position.
        """
        blocks = chain_blocks(index, slot, slot + end - begin)
        return PassPart(self.newest(begin, end), range(begin, end), blocks)


class Growth(ABC):
    """One way in which trees grow."""

    @abstractmethod
    def takes(self, sequence: GrownSequence) -> bool:
        """Get ready for a generation. Returns False if its trees cannot grow in this way."""

    @abstractmethod
    def grow(self, rounds: Sequence[tuple[Any, Budget]]) -> list[TokenTree]:
        """Grow the tree of each round that was begun, within its limits."""

    def draft_ahead(self, sequences: Sequence[Any]) -> Sequence[DraftSequence]:
        """See :meth:`~paceline.drafter.methods.base.Drafter.draft_ahead`; all sequences grow in
        this way."""
        return []


class TreeGrowth:
    """How the trees of a drafter's sequences grow: each in the first way that takes it.

    All but :meth:`way_of` runs on one thread at a time.
    """

    def __init__(self, *ways: Growth) -> None:
        self.ways = ways

    def way_of(self, sequence: GrownSequence) -> Growth:
        """Return the way in which the trees of a generation grow."""
        return next(way for way in self.ways if way.takes(sequence))

    def draft_many(
        self, rounds: Sequence[tuple[DraftSequence, Budget]]
    ) -> Sequence[TokenTree | KvGone]:
        """Grow one tree for each round, with shared forward passes.

        That a cache still exists is checked once, when all trees are on the host.
        """
        grown = cast(Sequence[tuple[GrownSequence, Budget]], rounds)
        trees: dict[GrownSequence, TokenTree | KvGone] = {}
        batches: dict[Growth, list[tuple[GrownSequence, Budget]]] = {}
        for sequence, budget in grown:
            try:
                limits = sequence.begin(budget)
            except KvGone as gone:
                trees[sequence] = gone
                continue
            if limits is not None:
                batches.setdefault(sequence.way, []).append((sequence, limits))
        for way, batch in batches.items():
            trees.update(zip((sequence for sequence, _ in batch), way.grow(batch), strict=True))
        for sequence, _ in grown:
            try:
                sequence.finish()
            except KvGone as gone:
                trees[sequence] = gone
        return [trees.get(sequence, EMPTY) for sequence, _ in grown]

    def draft_ahead(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        """See :meth:`~paceline.drafter.methods.base.Drafter.draft_ahead`."""
        grown = cast(Sequence[GrownSequence], sequences)
        going: list[DraftSequence] = []
        for way in self.ways:
            going += way.draft_ahead([sequence for sequence in grown if sequence.way is way])
        return going
