"""Trees of several texts that grow by levels of fixed width.

Level l of every tree has a fixed number of nodes, the likeliest ones over all its parents (after
EAGLE-2, section 4). Only nodes that could still be among the best of the whole tree are expanded.
Nodes that a tree does not have, because none may be expanded that could be their parent, have the
score -inf; a GPU computes them too. So the host knows rows, positions and cache slots of all passes
before the first one (:class:`HostDraft`), and has no part until all trees are complete. On a CPU a
pass leaves out nodes that no tree expands, and its plan has the parents of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.decoder.model import AttentionObserver
from paceline.device import device_of
from paceline.drafter.growth.ranking import Ranker, draw_rows, rank_rows
from paceline.drafter.growth.sequence import GrownSequence, Growth, PassPart, TreeSettings
from paceline.drafter.growth.target_data import StateRows
from paceline.kernels import (
    Context,
    EqualBlocks,
    KVCacheView,
    LevelBlock,
    Proposal,
    QueryBlock,
    TreePlan,
    plan_trees,
    send,
)
from paceline.tree import TokenTree

if TYPE_CHECKING:
    from paceline.drafter.generation import Budget
    from paceline.drafter.methods.options import TreeOptions

# Maps logits `[S F, V]` and the number of their level to ids and logs of their confidences, both
# `[S F, w]`, best first.
Rank = Callable[[Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class TreeShape:
    """Shape of all trees of a batch."""

    widths: tuple[int, ...]  # nodes that each level should have
    count: int  # logits that candidates are taken of, the first ones
    min_score: float  # nodes with a lower log of the survival are not expanded
    chain: bool  # whether no node can have a sibling

    @classmethod
    def of(
        cls, options: TreeOptions, levels: int, count: int, *, rejection: bool = False
    ) -> TreeShape:
        """Return the shape for the options of a method; trees are chains under ``rejection``
        sampling."""
        widths = (1,) if rejection else options.widths
        return cls(
            tuple(widths[min(level, len(widths) - 1)] for level in range(levels)),
            count,
            math.log(options.min_survival) if options.min_survival > 0 else -math.inf,
            set(widths) == {1},
        )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Nodes of each level; fewer than wanted where there are not as many candidates."""
        sizes, before = [], 1
        for width in self.widths:
            before = min(width, before * min(width, self.count))
            sizes.append(before)
        return tuple(sizes)

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """Nodes of the first levels: of none, of one, ..., of all."""
        return (0, *accumulate(self.sizes))


@dataclass(frozen=True)
class HostPass:
    """A forward pass as the host knows it before the draft."""

    blocks: Sequence[QueryBlock] = ()  # its blocks; `block.sequence` indexes the batch
    positions: Sequence[int] | NDArray[np.int64] = ()  # absolute position of each row
    # Token ids of the rows; none if they are drafted or the pass has none.
    tokens: Sequence[int] = ()
    # Rows that need logits; none if the rows of the newest level do.
    logit_rows: Sequence[int] = ()
    inputs: StateRows | None = None  # hidden states of the rows


@dataclass(frozen=True)
class HostDraft:
    """What the passes of a draft read."""

    passes: Sequence[HostPass]  # in order
    caches: Sequence[KVCacheView]  # KV by sequence
    contexts: Sequence[Context] = ()  # by sequence, for a model that attends to contexts
    observer: AttentionObserver | None = None  # of the attention of the first pass


def text_pass(parts: Sequence[PassPart], inputs: StateRows | None = None) -> HostPass:
    """Return the pass over the parts of several generations, with hidden states of its rows."""
    return HostPass(
        [block for part in parts for block in part.blocks],
        [position for part in parts for position in part.positions],
        [token for part in parts for token in part.tokens],
        [stop - 1 for stop in accumulate(len(part.tokens) for part in parts)],
        inputs,
    )


def level_passes(starts: Sequence[int], lengths: Sequence[int], shape: TreeShape) -> list[HostPass]:
    """Return the passes for all levels but the first, over all nodes so far: the first node of a
    sequence has this cache slot and this position."""
    passes, first = [], np.array(starts, np.int64)
    for level in range(1, len(shape.sizes)):
        block = LevelBlock(0, starts[0], None, shape.stops[level], levels=shape.sizes[:level])
        positions = np.add.outer(lengths, block.depths).ravel()
        passes.append(HostPass(EqualBlocks(block, first), positions))
    return passes


@dataclass(frozen=True)
class PassShape:
    """Largest shape of a pass."""

    rows: int  # rows of each sequence
    blocks: int = 1  # blocks of each sequence
    windows: tuple[int | None, ...] = ()  # windows of its layers that attend to the caches
    contexts: tuple[int | None, ...] = ()  # windows of its layers that attend to contexts
    tokens: bool = False  # whether the host gives its tokens
    logit_rows: int = 0  # rows of each sequence that need logits, if the host gives them
    inputs: int = 0  # width of its hidden states; 0: none
    taps: int = 1  # layers that they are of


def text_and_levels(text: PassShape, level: PassShape, shape: TreeShape) -> list[PassShape]:
    """Return the shapes of a pass over texts, and of the passes over the nodes of their trees."""
    first = replace(text, tokens=True, logit_rows=1)
    return [first, *(replace(level, rows=stop) for stop in shape.stops[1:-1])]


class Passes:
    """The passes of a draft on the device, sent there one by one."""

    def __init__(self, draft: HostDraft, device: torch.device) -> None:
        self._passes, self._device = draft.passes, device
        self.caches = draft.caches  # KV of each sequence
        self.contexts = draft.contexts  # contexts of each sequence
        self.observer = draft.observer

    def plan(self, index: int, trees: LevelTrees | None = None) -> TreePlan | None:
        """Return the plan of a pass, over the nodes of ``trees`` so far if they are given; None if
        it has no rows."""
        host_pass, ancestors = self._passes[index], None
        blocks, positions = host_pass.blocks, host_pass.positions
        if not blocks:
            return None
        if trees is not None and device_of(self._device).packs:
            stop = trees.frontier.stop
            positions = np.array(positions).reshape(len(blocks), -1)[:, :stop].ravel()
            blocks = [
                QueryBlock(block.sequence, block.start, tuple(parents), stop)
                for block, parents in zip(blocks, trees.parents[:, :stop].tolist(), strict=True)
            ]
        elif trees is not None:
            ancestors = trees.ancestors
        return plan_trees(blocks, positions=positions, device=self._device, ancestors=ancestors)

    def tokens(self, index: int) -> Tensor:
        """Return the tokens of its rows, int64 ``[M]``."""
        return send(torch.tensor(self._passes[index].tokens), self._device)

    def logit_rows(self, index: int) -> Tensor:
        """Return its rows that need logits, int64 ``[R]``."""
        return send(torch.tensor(self._passes[index].logit_rows), self._device)

    def inputs(self, index: int) -> Tensor | None:
        """Return the hidden states of its rows, ``[M, width]``."""
        inputs = self._passes[index].inputs
        return None if inputs is None else inputs.tensor()


class LevelTrees:
    """One tree of each of S sequences, on their device."""

    def __init__(
        self, shape: TreeShape, last: Tensor, rank: Rank, *, kernels: bool = False
    ) -> None:
        """Begin trees of a shape. ``last``: index of the worst node that fits each budget, among
        those sorted by score, int64 ``[S, 1]``, at most N - 1; ``rank`` ranks candidates;
        ``kernels``: whether a Triton kernel adds the levels."""
        self._shape, self._last, self._rank, self._kernels = shape, last, rank, kernels
        trees, nodes, device = len(last), shape.stops[-1], last.device
        self.level = 0  # levels so far
        self._expanded = 1  # nodes of the newest level that get children, the first ones
        # Token ids of the nodes, int64 `[S, N]`, level by level.
        self.tokens = torch.zeros(trees, nodes, dtype=torch.int64, device=device)
        # Their parents' numbers, int64 `[S, N]`; -1: the anchor.
        self.parents = torch.full((trees, nodes), -1, dtype=torch.int64, device=device)
        self._scores = torch.full((2, trees, nodes), -torch.inf, dtype=torch.float64, device=device)
        # Scores of the nodes that get children; -inf for the others of the newest level.
        self._above = torch.zeros(trees, 1, dtype=torch.float64, device=device)
        # Paths of all nodes to themselves, bool `[S, N, N]`; None if no pass is over nodes.
        self.paths: Tensor | None = None

    @property
    def grows(self) -> bool:
        return self.level < len(self._shape.sizes) and self._expanded > 0

    @property
    def frontier(self) -> slice:
        """Numbers of the newest level's nodes that get children; on a GPU all of them."""
        start = self._shape.stops[self.level - 1]
        return slice(start, start + self._expanded)

    def begin_paths(self) -> None:
        """Keep paths from now on."""
        trees, nodes = self.tokens.shape
        alone = torch.eye(nodes, dtype=torch.bool, device=self.tokens.device)
        self.paths = alone.repeat(trees, 1, 1)

    @property
    def ancestors(self) -> Tensor:
        """Paths of the nodes so far to themselves, bool ``[S, n, n]``."""
        assert self.paths is not None
        stop = self._shape.stops[self.level]
        return self.paths[:, :stop, :stop]

    def next_pass(self, passes: Passes) -> tuple[Tensor, TreePlan, Tensor]:
        """Return tokens, plan and logit rows of the pass for the next level, if the first pass is
        over the texts and the others are :func:`level_passes`."""
        if self.paths is None:
            self.begin_paths()
        plan = passes.plan(self.level, self if self.level else None)
        assert plan is not None
        if not self.level:
            return passes.tokens(0), plan, passes.logit_rows(0)
        trees, stop = len(self.tokens), self.frontier.stop
        rows = torch.arange(trees * stop, device=self.tokens.device).view(-1, stop)
        return self.tokens[:, :stop].flatten(), plan, rows[:, self.frontier].flatten()

    def add_level(self, logits: Tensor, log_confidences: Tensor | None = None) -> None:
        """Add children of the frontier: the likeliest of the candidates after its nodes, by logits
        ``[S F, V]`` after each, or of drafted tokens alone. ``log_confidences`` are of a confidence
        head for each, float64 ``[S, F]``: in a chain the only child gets it as it is (DSpark,
        equation 7), siblings are scaled together, so that the likeliest is no more confident than
        the head."""
        candidates = self._rank(logits, self.level)
        add = self._add_by_kernel if self._kernels else self._add
        add(candidates, self._shape.stops[self.level], log_confidences)

    def _add_by_kernel(
        self, candidates: tuple[Tensor, Tensor], first: int, log_confidences: Tensor | None
    ) -> None:
        from paceline.cuda.triton.candidates import grow_trees

        self._above = grow_trees(
            candidates, self._above, self._last, (self.tokens, self.parents, self._scores),
            self.paths, first, self._shape.sizes[self.level],
            min_score=self._shape.min_score, chain=self._shape.chain, confidences=log_confidences,
        )  # fmt: skip
        self._expanded = self._shape.sizes[self.level]
        self.level += 1

    def _add(
        self, candidates: tuple[Tensor, Tensor], first: int, log_confidences: Tensor | None
    ) -> None:
        trees, parents = len(self._last), len(candidates[0]) // len(self._last)
        ids, logs = (part.view(trees, parents, -1) for part in candidates)
        logs = logs.double()
        if log_confidences is not None:
            change = log_confidences - logs[..., 0]
            change = change if self._shape.chain else change.clamp(max=0.0)
            logs = logs + change.nan_to_num(0.0, 0.0, 0.0)[..., None]
        logs = logs.clamp(max=0.0)
        scores = (self._above[..., None] + logs).flatten(1)
        best, order = scores.sort(dim=1, descending=True, stable=True)
        best, order = (part[:, : self._shape.sizes[self.level]] for part in (best, order))
        size, of = best.shape[1], order // ids.shape[2]
        self.level += 1
        new = slice(first, first + size)
        self.tokens[:, new] = ids.flatten(1).gather(1, order)
        self._scores[0, :, new] = best
        self._scores[1, :, new] = logs.flatten(1).gather(1, order)
        if first:
            before = slice(self._shape.stops[self.level - 2], first)
            self.parents[:, new] = of + before.start
        if not self.grows:
            return
        if first and self.paths is not None:
            at = of[..., None].expand(-1, -1, first)
            self.paths[:, new, :first] = self.paths[:, before, :first].gather(1, at)
        worst = self._scores[0].sort(descending=True).values.gather(1, self._last)
        expanded = (best >= self._shape.min_score) & (best > worst)
        self._expanded = (
            size if device_of(expanded.device).runs_beside else int(expanded.sum(1).max())
        )
        self._above = torch.where(expanded, best, -torch.inf)[:, : self._expanded]

    def packed(self) -> Tensor:
        """Return token, parent, score and log of the confidence of each node, float64
        ``[S, N, 4]``."""
        return torch.stack([self.tokens.double(), self.parents.double(), *self._scores], -1)


def read_trees(
    packed: Tensor,
    budgets: Sequence[Budget],
    shape: TreeShape,
    proposals: Sequence[Sequence[Proposal]],
) -> list[TokenTree]:
    """Return the best nodes of each tree within its budget, sorted by falling survival. ``packed``
    is what :meth:`LevelTrees.packed` returned, on the CPU, of trees with enough levels; a tree with
    ``proposals`` is a chain, one per level."""
    nodes = packed.numpy()
    stops = np.array([shape.stops[budget.depth] for budget in budgets])
    within = np.arange(nodes.shape[1]) < stops[:, None]
    scores = np.where(within, nodes[..., 2], -np.inf)
    # A child scores no more than its parent and has a higher number: parents come first.
    order = np.argsort(-scores, axis=1, kind="stable")
    places = np.argsort(order, axis=1, kind="stable")
    counts = np.minimum((scores > -np.inf).sum(1), [budget.nodes for budget in budgets])
    order = order[:, : counts.max()]
    tokens, parents = (
        np.take_along_axis(nodes[..., column].astype(np.int64), order, 1) for column in (0, 1)
    )
    parents = np.where(parents < 0, -1, np.take_along_axis(places, parents.clip(0), 1))
    chances = np.exp(np.take_along_axis(nodes[..., 3], order, 1))
    columns = [column.tolist() for column in (tokens, parents, chances)]
    return [
        TokenTree(*(tuple(part[:count]) for part in parts))
        for *parts, count in zip(*columns, proposals, counts.tolist(), strict=True)
    ]


class LevelModel(Protocol):
    """A model whose trees grow by levels."""

    def draft_passes(self, batch: Sequence[Any], shape: TreeShape) -> HostDraft:
        """Return the passes of a draft for generations whose trees have this shape."""

    def grow(self, passes: Passes, trees: LevelTrees) -> None:
        """Grow trees by these passes, without waiting for a GPU."""


class LevelGrowth(Growth):
    """Growth of all trees, level by level."""

    replays = False  # whether there are captured drafts, whose trees have all levels

    def __init__(self, model: LevelModel, settings: TreeSettings) -> None:
        self._model, self._settings = model, settings

    def takes(self, sequence: GrownSequence) -> bool:
        return True

    def grow(self, rounds: Sequence[tuple[GrownSequence, Budget]]) -> list[TokenTree]:
        batches: dict[object, list[tuple[GrownSequence, Budget]]] = {}
        for sequence, limits in rounds:
            batches.setdefault(sequence.ranker.kind, []).append((sequence, limits))
        trees: dict[GrownSequence, TokenTree] = {}
        for batch in batches.values():
            with torch.inference_mode():
                trees.update(zip((text for text, _ in batch), self._grow(batch), strict=True))
        return [trees[sequence] for sequence, _ in rounds]

    def _grow(self, batch: Sequence[tuple[GrownSequence, Budget]]) -> list[TokenTree]:
        """Grow trees whose candidates are ranked together."""
        sequences, limits = zip(*batch, strict=True)
        rankers = [sequence.ranker for sequence in sequences]
        count, penalised, rejection = rankers[0].kind
        replays = self.replays and not (penalised or rejection)
        depth = max(budget.depth for budget in limits)
        levels = self._settings.max_depth if replays else depth
        shape = TreeShape.of(self._settings.options, levels, count, rejection=rejection)
        lengths = [sequence.length for sequence in sequences]
        last = [min(budget.nodes, shape.stops[-1]) - 1 for budget in limits]
        draft = self._model.draft_passes(sequences, shape)
        nodes = self.replay(draft, rankers, lengths, last) if replays else None
        proposals: list[list[Proposal]] = [[] for _ in batch]
        if nodes is None:
            device = self._settings.device
            worst = send(torch.tensor(last)[:, None], device)
            rank = _ranking(rankers, lengths, shape, proposals)
            trees = LevelTrees(shape, worst, rank, kernels=device_of(device).graphs)
            self._model.grow(Passes(draft, device), trees)
            nodes = trees.packed().cpu()
        for sequence in sequences:
            sequence.keep()
        return read_trees(nodes, limits, shape, proposals)

    def replay(
        self,
        draft: HostDraft,
        rankers: Sequence[Ranker],
        lengths: Sequence[int],
        last: Sequence[int],
    ) -> Tensor | None:
        """Draft for a batch by a captured draft; None: there is none for it."""
        return None


def _ranking(
    rankers: Sequence[Ranker],
    lengths: Sequence[int],
    shape: TreeShape,
    proposals: Sequence[list[Proposal]],
) -> Rank:
    """Return what ranks candidates for texts of some lengths, and collects distributions that
    tokens are drawn from."""

    def rank(logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        positions = [length + level for length in lengths]
        if rankers[0].params.rejection:
            return draw_rows(rankers, logits, positions, proposals)
        if device_of(logits.device).runs_beside:
            return rank_rows(rankers, logits, positions, shape.widths[level])
        parts = logits.split(len(logits) // len(rankers))
        ids, logs = zip(
            *(
                ranker.rank(part, position, shape.widths[level])
                for ranker, part, position in zip(rankers, parts, positions, strict=True)
            ),
            strict=True,
        )
        return torch.cat(ids), torch.cat(logs)

    return rank
