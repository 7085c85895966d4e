"""Drafters with a model, whose sequences grow their trees together."""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from paceline.decoder import DecoderConfig
from paceline.decoder.config import Rope
from paceline.decoder.sampling import sampling_params
from paceline.drafter.kv import KvGone
from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    DraftSequence,
    Fit,
    GenerationInfo,
    Update,
)
from paceline.drafter.methods.beam import Beam, BeamOptions, Chain, Ranked, Ranker
from paceline.drafter.methods.device_trees import (
    DeviceTrees,
    HostDraft,
    HostPass,
    Passes,
    TreeShape,
    rank_on_device,
    read_trees,
)
from paceline.drafter.methods.draft_graphs import DraftGraphs, graphs_work_on
from paceline.drafter.methods.layers import LayerShape
from paceline.drafter.methods.target_data import StateRows
from paceline.kernels import CHUNK, MAX_TREE_NODES, TreePlan, TreeSegment, send
from paceline.kernels.draft import NativeDraft
from paceline.kernels.structures import DraftText
from paceline.tree import EMPTY, TokenTree

logger = logging.getLogger("paceline.drafter")

Source = TypeVar("Source")


def required(source: Source | None, method: str, what: str) -> Source:
    """Returns the target's data of a generation.

    Raises:
        ValueError: The generation comes without it.
    """
    if source is None:
        raise ValueError(
            f"{method} reads the target's {what}, but the generation has none; open it "
            "with a read_grant"
        )
    return source


def chain_segments(index: int, begin: int, end: int) -> list[TreeSegment]:
    """Returns positions ``begin`` to ``end`` of cache ``index``, cut at multiples of ``CHUNK``.

    With these cuts the bits of their KV do not depend on how a text is split over forward passes.
    """
    segments = []
    while begin < end:
        stop = min(end, (begin // CHUNK + 1) * CHUNK)
        segments.append(TreeSegment(index, begin, None, stop - begin))
        begin = stop
    return segments


class BeamSequence(DraftSequence):
    """One generation of a :class:`BeamDrafter`: its text, and the tree of a round.

    In a round the drafter calls :meth:`begin`, grows the tree level by level, then calls
    :meth:`finish`. If the KV of a sequence depends on tokens only, a chain can grow beyond the tree
    of a round: up to one more token, the verifier's own, and the chain of the next round.
    """

    def __init__(
        self, drafter: BeamDrafter[Any], generation: GenerationInfo, kept: int | None = None
    ) -> None:
        """Starts a sequence that keeps this many of the newest tokens of its text; None: all."""
        tokens = generation.tokens
        self.text: list[int] | deque[int] = list(tokens) if kept is None else deque(tokens, kept)
        """The text, or its newest tokens."""
        self.length = len(tokens)
        """Tokens of the text."""
        self.room = 2 * drafter.options.drafted + 1
        """Slots behind the text for the nodes of a round and those drafted ahead."""
        self.beam: Beam | None = None
        """The tree of the newest round; None if there is none."""
        self._ahead: Chain | None = None
        """What was drafted ahead and is the text's continuation; None: nothing."""
        self._drafter = drafter
        self.ranker = Ranker(
            sampling_params(generation.sampling),
            prompt=generation.tokens[: generation.prompt_length],
            output=generation.tokens[generation.prompt_length :],
            vocab_size=min(generation.vocab_size, drafter.shape.vocab_size),
            candidates=drafter.options.candidates,
            drafted=drafter.drafted_tokens,
            drafted_on_device=drafter.drafted_on_device,
        )
        self._widths = self.ranker.widths(drafter.options.widths)
        self.draft_text = self._draft_text()
        """The text for native drafts; None: there are none of its drafter, or of its sampling."""

    @property
    def drafts_on_device(self) -> bool:
        """Whether a tree grows on the drafter's device without the host."""
        return self._drafter.grows_on_device and not self.ranker.by_paths

    def extend(self, update: Update) -> None:
        if update.tokens:
            self._ahead = self.beam.after(update.tokens) if self.beam is not None else None
            self.beam = None
        self.text.extend(update.tokens)
        self.length += len(update.tokens)
        self.ranker.extend(update.tokens)

    def draft(self, budget: Budget) -> TokenTree:
        (tree,) = self._drafter.draft_many([(self, budget)])
        if isinstance(tree, KvGone):
            raise tree
        return tree

    def begin(self, budget: Budget, text: DraftText | None = None) -> bool:
        """Starts the tree of a round. Returns False if nothing can be drafted.

        Args:
            budget: Its limits.
            text: :attr:`draft_text`, if one native call drafts the tree: gets its limits.
        """
        self.beam = None
        limits = self._limits(budget)
        if limits is None:
            return False
        ahead, self._ahead = self._ahead, None
        if text is not None or ahead is None or not self.keep_ahead():
            ahead = None
            if not self.prepare():
                return False
        if text is not None:
            late = time.monotonic() >= budget.deadline
            text.nodes, text.depth = limits.nodes, 1 if late else limits.depth
        else:
            if self.drafts_on_device and time.monotonic() >= budget.deadline:
                limits = replace(limits, depth=1)
            self.beam = Beam(limits, self._widths, self._drafter.options.min_survival, ahead)
        return True

    def _limits(self, budget: Budget) -> Budget | None:
        """Returns the limits of a round's tree; None if nothing can be drafted."""
        drafter = self._drafter
        depth = min(budget.depth, drafter.max_depth, drafter.shape.max_position - self.length + 1)
        nodes = min(budget.nodes, drafter.max_nodes)
        return Budget(nodes, depth) if nodes > 0 and depth > 0 else None

    def fill(self, text: DraftText) -> None:
        """Sets the other fields of :attr:`draft_text` that differ from round to round, and counts
        what the native call will write as written."""

    def _draft_text(self) -> DraftText | None:
        drafter, count = self._drafter, self.ranker.plain_logits()
        if not count or drafter.native is None:
            return None
        params, survival = self.ranker.params, drafter.options.min_survival
        text = DraftText(
            count=count,
            temperature=params.temperature,
            seed=params.seed,
            min_score=math.log(survival) if survival > 0 else -math.inf,
        )
        text.set_widths(self._widths)
        return text

    def begin_ahead(self) -> bool:
        """Gets ready for a level beyond the tree. Returns False if it cannot be drafted."""
        return False

    def keep_ahead(self) -> bool:
        """Gets a round ready that begins with nodes drafted ahead. Returns False if it cannot."""
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
        return self.ranker.rank(logits, position, beam.frontier_tokens(), beam.width)

    def grow(self, logits: Tensor, exponent: float = 1.0) -> None:
        """Adds a level to the tree from the logits ``[frontier, V]`` of the block that was fed.

        Confidences are probabilities to the power of ``exponent``.
        """
        if self.tree.level:
            self.tree.mark_fed()
        ranked = self.rank(logits)
        if exponent != 1.0:
            ranked = ranked._replace(logs=ranked.logs * exponent)
        self.tree.add_level(ranked)

    def text_block(self, index: int, begin: int, end: int, slot: int) -> Block:
        """Returns positions ``begin`` to ``end`` of the text, to be fed.

        ``index`` is that of this sequence's cache in the pass, ``slot`` that of the first position.
        """
        tokens = [self.text[at - self.length] for at in range(begin, end)]
        segments = chain_segments(index, slot, slot + end - begin)
        return Block(tokens, range(begin, end), segments, 1)

    def tree_block(self, index: int, slot: int) -> Block:
        """Returns the nodes of the tree to be fed for its next level; arguments as of
        :meth:`text_block`, ``slot`` is that of the tree's first node."""
        beam = self.tree
        tokens, parents = beam.block()
        segment = TreeSegment(index, slot + beam.trunk, parents, len(tokens))
        positions = [self.length + beam.trunk + depth for depth in segment.depths]
        return Block(tokens, positions, [segment], len(beam.frontier))

    def chain_grows(self) -> bool:
        """Makes the last node of a chain the frontier, to draft ahead. Returns False if there is
        no such node or no room behind it."""
        return (
            self.beam is not None
            and self.beam.level < self.room
            and self.length + self.beam.level < self._drafter.shape.max_position
            and self.beam.expand_last()
        )

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

    def __init__(
        self, shape: DecoderConfig | LayerShape, options: BeamOptions, fit: Fit, size: int
    ) -> None:
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
        self.drafted_on_device: Tensor | None = None
        """The same on the model's device, if that is another one."""
        self.device = torch.device("cpu")
        """Device of the model."""
        self.native: NativeDraft | None = None
        """Drafts in one native call; None: by levels."""
        self.rope: Rope | None = None
        """Cosines and sines for native drafts."""

    grows_on_device: bool = False
    """Whether trees grow by :meth:`grow_on_device`."""

    graphs: DraftGraphs | None = None
    """Runs captured drafts; None: there are none."""

    def set_device(self, device: torch.device, drafted_tokens: Tensor | None) -> None:
        """Sets :attr:`device` and :attr:`drafted_tokens`, and what follows from them."""
        self.device, self.drafted_tokens = device, drafted_tokens
        if device.type != "cpu":
            self.grows_on_device = type(self).grow_on_device is not BeamDrafter.grow_on_device
            self.drafted_on_device = (
                None if drafted_tokens is None else send(drafted_tokens, device)
            )

    def draft_many(
        self, rounds: Sequence[tuple[DraftSequence, Budget]]
    ) -> Sequence[TokenTree | KvGone]:
        """Grows one tree for each round: in one native call or on a GPU where that is possible,
        else by levels.

        A tree gets no further level that would probably end after its deadline. The estimate for a
        level is the duration of the one before. In a native call, and on a GPU, a tree whose
        deadline has passed gets one level.

        That a cache still exists is checked once, when all trees are on the host.
        """
        own = cast(Sequence[tuple[S, Budget]], rounds)
        found: dict[S, TokenTree | KvGone] = {}
        native = [each for each in own if each[0].draft_text is not None]
        on_device = [each for each in own if each[0].drafts_on_device]
        rest = [each for each in own if each[0].draft_text is None and not each[0].drafts_on_device]
        self._draft_natively(native, found)
        self._grow_batches(on_device, found)
        self._grow_by_levels(rest, found)
        for sequence, _ in own:
            try:
                sequence.finish()
            except KvGone as gone:
                found[sequence] = gone
            if sequence not in found:
                found[sequence] = EMPTY if sequence.beam is None else sequence.beam.tree()
        return [found[sequence] for sequence, _ in own]

    def _begin(
        self,
        rounds: Sequence[tuple[S, Budget]],
        found: dict[S, TokenTree | KvGone],
        *,
        native: bool = False,
    ) -> list[tuple[S, Budget]]:
        """Begins rounds. Returns those for which something can be drafted."""
        begun = []
        for sequence, budget in rounds:
            try:
                if sequence.begin(budget, sequence.draft_text if native else None):
                    begun.append((sequence, budget))
            except KvGone as gone:
                found[sequence] = gone
        return begun

    def _grow_batches(
        self, rounds: Sequence[tuple[S, Budget]], found: dict[S, TokenTree | KvGone]
    ) -> None:
        growing: dict[int, list[S]] = {}
        for sequence, _ in self._begin(rounds, found):
            growing.setdefault(sequence.ranker.count, []).append(sequence)
        for batch in growing.values():  # one, but for services of targets with other vocabularies
            with torch.inference_mode():
                found.update(zip(batch, self._grow_batch(batch), strict=True))

    def warm_up(self) -> None:
        """Captures the CUDA graphs of all batches. If that fails, there are none."""
        try:
            if self.graphs is not None:
                self.graphs.warm_up()
        except Exception:  # of kernels, their compiler, the driver: any that there is
            logger.warning("%s drafts without CUDA graphs", self.method, exc_info=True)
            self.graphs = None

    def _grow_batch(self, batch: Sequence[S]) -> list[TokenTree]:
        depth = max(sequence.tree.limits.depth for sequence in batch)
        levels = depth if self.graphs is None else self.max_depth
        shape = TreeShape.of(self.options, levels, batch[0].ranker.count)
        rankers = [sequence.ranker for sequence in batch]
        lengths = [sequence.length for sequence in batch]
        last = [min(sequence.tree.limits.nodes, shape.stops[-1]) - 1 for sequence in batch]
        draft = self.draft_passes(batch, shape)
        nodes = None if self.graphs is None else self.graphs.run(draft, rankers, lengths, last)
        if nodes is None:
            worst = send(torch.tensor(last)[:, None], self.device)
            rank = rank_on_device(rankers, lengths, shape)
            trees = DeviceTrees(shape, worst, rank, kernels=graphs_work_on(self.device))
            self.grow_on_device(Passes(draft, self.device), trees)
            nodes = trees.packed().cpu()
        self.drafted(batch)
        return read_trees(nodes, [sequence.tree.limits for sequence in batch], shape)

    def draft_passes(self, growing: Sequence[S], shape: TreeShape) -> HostDraft:
        """Returns the passes of a draft on a GPU, whose trees have this shape."""
        raise NotImplementedError

    def drafted(self, growing: Sequence[S]) -> None:
        """Notes that the passes for sequences were launched."""

    def grow_on_device(self, passes: Passes, trees: DeviceTrees) -> None:
        """Grows trees by these passes on a GPU, without waiting for it."""
        raise NotImplementedError

    def _grow_by_levels(
        self, rounds: Sequence[tuple[S, Budget]], found: dict[S, TokenTree | KvGone]
    ) -> None:
        growing = [each for each in self._begin(rounds, found) if each[0].tree.grows]
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

    def _draft_natively(
        self, rounds: Sequence[tuple[S, Budget]], found: dict[S, TokenTree | KvGone]
    ) -> None:
        begun = self._begin(rounds, found, native=True)
        texts = {each: each.draft_text for each, _ in begun if each.draft_text is not None}
        for sequence, text in texts.items():  # only now: to begin another may have failed
            sequence.fill(text)
        if texts:
            assert self.native is not None
            assert self.rope is not None
            longest = max(t.length + max(t.depth, self.max_depth) for t in texts.values())
            self.native.draft(list(texts.values()), self.rope.table(longest))
        for sequence, text in texts.items():
            columns = (each[: text.drafted] for each in (text.token, text.parent, text.chance))
            found[sequence] = TokenTree(*map(tuple, columns))

    def draft_ahead(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        going = [each for each in cast(Sequence[S], sequences) if each.begin_ahead()]
        if going:
            self.grow_level(going)
        return list(going)

    @abstractmethod
    def grow_level(self, growing: Sequence[S]) -> None:
        """Adds one level to the tree of each sequence, by one forward pass over all frontiers."""


@dataclass(frozen=True)
class Block:
    """One generation's tokens in a forward pass.

    Attributes:
        tokens: Token ids.
        positions: Absolute position of each.
        segments: Cache slots of their KV.
        logit_rows: How many of the last tokens need logits.
    """

    tokens: list[int]
    positions: Sequence[int]
    segments: list[TreeSegment]
    logit_rows: int


Forward = Callable[[Tensor, TreePlan, Tensor], Tensor]
"""Maps tokens ``[M]``, their plan and the rows that need logits, int64 ``[R]``, to the logits."""


def forward_blocks(forward: Forward, blocks: Sequence[Block], device: torch.device) -> list[Tensor]:
    """Runs one forward pass over the blocks of several generations.

    Args:
        forward: The pass of the model.
        blocks: One per generation; segments refer to its caches by index.
        device: Device of the model.

    Returns:
        Logits ``[logit_rows, V]`` of each block.
    """
    passes = Passes(HostDraft([text_pass(blocks)], []), device)
    plan = passes.plan(0)
    assert plan is not None
    logits = forward(passes.tokens(0), plan, passes.logit_rows(0))
    return list(logits.split([block.logit_rows for block in blocks]))


def text_pass(blocks: Sequence[Block], inputs: StateRows | None = None) -> HostPass:
    """Returns the pass over the blocks of several generations, with hidden states of its rows."""
    stops = accumulate(len(block.tokens) for block in blocks)
    counts = [block.logit_rows for block in blocks]
    return HostPass(
        [segment for block in blocks for segment in block.segments],
        [position for block in blocks for position in block.positions],
        [token for block in blocks for token in block.tokens],
        [r for stop, n in zip(stops, counts, strict=True) for r in range(stop - n, stop)],
        inputs,
    )
