"""A generation's text and tree, what a method reads and feeds for it, and ways in which trees grow.

Of the three ways one is of each module: :mod:`~paceline.drafter.growth.host`,
:mod:`~paceline.drafter.growth.native` and :mod:`~paceline.drafter.growth.device`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.drafter.generation import Budget, GenerationInfo
from paceline.drafter.growth.beam import Beam, Chain, Ranked, Ranker
from paceline.kernels import CHUNK, MAX_TREE_NODES, QueryBlock, send
from paceline.kernels.structures import DraftText
from paceline.text import sampling_params
from paceline.tree import TokenTree

Source = TypeVar("Source")


def required(source: Source | None, method: str, what: str) -> Source:
    """Return the target's data of a generation.

    Raises:
        ValueError: The generation comes without it.
    """
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
    """One generation's tokens in a forward pass."""

    tokens: list[int]  # token ids
    positions: Sequence[int]  # absolute position of each
    blocks: list[QueryBlock]  # cache slots of their KV
    logit_rows: int  # how many of the last tokens need logits


class TreeChoices(Protocol):
    """The options of a method that its trees depend on, as
    :class:`paceline.drafter.methods.options.TreeOptions` has them."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Nodes drafted at each level; the last number applies to all deeper levels."""

    @property
    def levels(self) -> int:
        """Maximum depth. Unit: tokens."""

    @property
    def drafted(self) -> int:
        """Nodes drafted in a round, before the likeliest are selected."""

    @property
    def max_nodes(self) -> int:
        """Maximum number of nodes of a tree; 0: all that were drafted."""

    @property
    def min_survival(self) -> float:
        """Nodes less likely than this to be accepted are not expanded."""

    @property
    def candidates(self) -> int:
        """At temperatures above 0, the shared noise is added to this many likeliest tokens."""


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

    options: TreeChoices  # widths, depth and limits
    vocab_size: int  # number of token ids of the model
    max_position: int  # positions that the model knows
    device: torch.device  # device of the model
    drafted: Tensor | None = None
    """The target's token id of each logit, rising, int64 ``[R]`` on the CPU; None: all ids."""

    drafted_on_device: Tensor | None = None
    """The drafted tokens on the model's device, if that is another one."""

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        options: TreeChoices,
        device: torch.device | None = None,
        drafted: Tensor | None = None,
    ) -> TreeSettings:
        """Return the settings for a model of a shape; ``drafted`` as above."""
        device = device or torch.device("cpu")
        copied = None if drafted is None or device.type == "cpu" else send(drafted, device)
        return cls(options, shape.vocab_size, shape.max_position, device, drafted, copied)

    @property
    def max_nodes(self) -> int:
        """Maximum number of nodes of a tree."""
        return min(self.options.max_nodes or MAX_TREE_NODES - 1, self.options.drafted)

    @property
    def max_depth(self) -> int:
        """Maximum depth. Unit: tokens."""
        return self.options.levels

    @property
    def logits(self) -> int:
        """Number of logits of the model."""
        return self.vocab_size if self.drafted is None else len(self.drafted)


class GrownText:
    """The text of a generation, and the tree of its newest round.

    If the KV of a sequence depends on tokens only, a chain can grow beyond the tree of a round: up
    to one more token, the verifier's own, and the chain of the next round.
    """

    def __init__(
        self, settings: TreeSettings, generation: GenerationInfo, kept: int | None = None
    ) -> None:
        """Start a text that keeps this many of its newest tokens; None: all."""
        tokens, options = generation.tokens, settings.options
        self.tokens: list[int] | deque[int] = list(tokens) if kept is None else deque(tokens, kept)
        """The text, or its newest tokens."""
        self.length = len(tokens)  # tokens of the text
        self.room = 2 * options.drafted + 1
        """Slots behind the text for the nodes of a round and those drafted ahead."""
        self.beam: Beam | None = None
        """The tree of the newest round; None if there is none on the host."""
        self.ahead: Chain | None = None
        """What was drafted ahead and is the text's continuation; None: nothing."""
        self.ranker = Ranker(
            sampling_params(generation.sampling),
            prompt=generation.tokens[: generation.prompt_length],
            output=generation.tokens[generation.prompt_length :],
            vocab_size=min(generation.vocab_size, settings.vocab_size),
            candidates=options.candidates,
            drafted=settings.drafted,
            drafted_on_device=settings.drafted_on_device,
        )
        self.widths = self.ranker.widths(options.widths)  # nodes of each level of its trees
        self.native: DraftText | None = None
        """The text for native drafts; None: its trees grow in another way."""
        self.on_device = False  # whether its trees grow on the model's device without the host
        self._settings = settings

    def extend(self, tokens: Sequence[int]) -> None:
        if tokens:
            self.ahead = self.beam.after(tokens) if self.beam is not None else None
            self.beam = None
        self.tokens.extend(tokens)
        self.length += len(tokens)
        self.ranker.extend(tokens)

    @property
    def tree(self) -> Beam:
        """The tree of the round.

        Raises:
            RuntimeError: No round has begun.
        """
        if self.beam is None:
            raise RuntimeError("this sequence has no tree; call begin first")
        return self.beam

    def limits(self, budget: Budget) -> Budget | None:
        """Return the limits of a round's tree; None if nothing can be drafted."""
        settings = self._settings
        depth = min(budget.depth, settings.max_depth, settings.max_position - self.length + 1)
        nodes = min(budget.nodes, settings.max_nodes)
        return Budget(nodes, depth) if nodes > 0 and depth > 0 else None

    def begin_beam(self, limits: Budget, ahead: Chain | None) -> None:
        """Begin a tree with the nodes that were drafted ahead."""
        self.beam = Beam(limits, self.widths, self._settings.options.min_survival, ahead)

    def rank(self, logits: Tensor) -> Ranked:
        """Rank the children of the frontier's nodes from their logits ``[frontier, V]``."""
        beam = self.tree
        position = self.length + beam.level
        return self.ranker.rank(logits, position, beam.frontier_tokens(), beam.width)

    def grow(self, logits: Tensor) -> None:
        """Add a level to the tree from the logits ``[frontier, V]`` of the block that was fed."""
        if self.tree.level:
            self.tree.mark_fed()
        self.tree.add_level(self.rank(logits))

    def newest(self, begin: int, end: int) -> list[int]:
        """Return the tokens at positions ``begin`` to ``end``, all among those that are kept."""
        return [self.tokens[at - self.length] for at in range(begin, end)]

    def text_part(self, index: int, begin: int, end: int, slot: int) -> PassPart:
        """Return positions ``begin`` to ``end`` of the text, to be fed.

        ``index`` is that of the text's cache in the pass, ``slot`` that of the first position.
        """
        blocks = chain_blocks(index, slot, slot + end - begin)
        return PassPart(self.newest(begin, end), range(begin, end), blocks, 1)

    def tree_part(self, index: int, slot: int) -> PassPart:
        """Return the nodes of the tree to be fed for its next level; arguments as of
        :meth:`text_part`, ``slot`` is that of the tree's first node."""
        beam = self.tree
        tokens, parents = beam.block()
        block = QueryBlock(index, slot + beam.trunk, parents, len(tokens))
        positions = [self.length + beam.trunk + depth for depth in block.depths]
        return PassPart(tokens, positions, [block], len(beam.frontier))

    def chain_grows(self) -> bool:
        """Make the last node of a chain the frontier, to draft ahead. Returns False if there is
        no such node or no room behind it."""
        return (
            self.beam is not None
            and self.beam.level < self.room
            and self.length + self.beam.level < self._settings.max_position
            and self.beam.expand_last()
        )


class TextPasses(ABC):
    """What a method reads and feeds for one generation."""

    text: GrownText  # the text and its tree

    @property
    def backlog(self) -> int:
        """See :attr:`~paceline.drafter.generation.DraftSequence.backlog`."""
        return 0

    def warm(self, limit: int) -> None:  # noqa: B027 - only methods with a backlog need it
        """See :meth:`~paceline.drafter.generation.DraftSequence.warm`."""

    def extend(self, tokens: Sequence[int]) -> None:  # noqa: B027 - for methods that keep more
        """Note emitted tokens before :attr:`text` gets them."""

    @abstractmethod
    def prepare(self) -> bool:
        """Gets ready what the round reads. Returns False if the round cannot be drafted.

        Raises:
            KvGone: The cache whose KV or hidden states are read is gone.
        """

    def fill(self, text: DraftText) -> None:  # noqa: B027 - only methods with native drafts need it
        """Set the fields of a text that differ from one native call to the next, and counts what
        the call will write as written."""

    def begin_ahead(self) -> bool:
        """Gets ready for a level beyond the tree. Returns False if it cannot be drafted."""
        return False

    def keep_ahead(self) -> bool:
        """Gets a round ready that begins with nodes drafted ahead. Returns False if it cannot."""
        return False

    def finish(self) -> None:  # noqa: B027 - only methods that read a target need it
        """End the round.

        Raises:
            KvGone: The cache was released while it was read.
        """

    def close(self) -> None:  # noqa: B027 - only methods that hold more than memory need it
        """Release memory."""


class Growth(ABC):
    """One way in which trees grow."""

    at_once: ClassVar[bool]
    """Whether the host has no part between levels: a late tree gets one level from the start."""

    @abstractmethod
    def start(self, passes: TextPasses) -> bool:
        """Gets ready for a generation. Returns False if its trees cannot grow in this way."""

    @abstractmethod
    def begin(self, passes: TextPasses, limits: Budget, ahead: Chain | None) -> None:
        """Begin the tree of a round within limits, with the nodes that were drafted ahead."""

    @abstractmethod
    def grow(self, rounds: Sequence[tuple[TextPasses, Budget]]) -> list[TokenTree]:
        """Grow the tree of each round that was begun; budgets have the deadlines."""
