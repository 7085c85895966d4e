"""Trees of several sequences that grow on a GPU without the host, in fixed shapes.

Level l of every tree has a fixed number of nodes, the likeliest ones as in
:class:`~paceline.drafter.growth.beam.Beam`. Nodes that a tree does not have, because none may be
expanded that could be their parent, have the score -inf; they are computed too. So the host knows
rows, positions and cache slots of all passes before the first one (:class:`HostDraft`). It reads
all trees once, when they are complete.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.drafter.generation import Budget
from paceline.drafter.growth.beam import Chain, Ranker, rank_rows
from paceline.drafter.growth.target_data import StateRows
from paceline.drafter.growth.text import Growth, PassPart, TextPasses, TreeChoices, TreeSettings
from paceline.kernels import (
    Context,
    EqualBlocks,
    KVCacheView,
    LevelBlock,
    QueryBlock,
    TreePlan,
    plan_trees,
    send,
)
from paceline.tree import TokenTree

Rank = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Maps logits ``[S F, V]`` and the number of their level to candidates, as :func:`rank_rows`."""


@dataclass(frozen=True)
class TreeShape:
    """Shape of all trees of a batch."""

    widths: tuple[int, ...]  # nodes that each level should have
    count: int  # logits that candidates are taken of, the first ones
    min_score: float  # nodes with a lower log of the survival are not expanded
    chain: bool  # whether no node can have a sibling

    @classmethod
    def of(cls, options: TreeChoices, levels: int, count: int) -> TreeShape:
        """Return the shape for the options of a method."""
        last, survival = len(options.widths) - 1, options.min_survival
        return cls(
            tuple(options.widths[min(level, last)] for level in range(levels)),
            count,
            math.log(survival) if survival > 0 else -math.inf,
            set(options.widths) == {1},
        )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Nodes of each level; fewer than wanted where there are not as many candidates."""
        found, before = [], 1
        for width in self.widths:
            before = min(width, before * min(width, self.count))
            found.append(before)
        return tuple(found)

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """Nodes of the first levels: of none, of one, ..., of all."""
        return (0, *accumulate(self.sizes))


@dataclass(frozen=True)
class HostPass:
    """A forward pass as the host knows it before the draft."""

    blocks: Sequence[QueryBlock] = ()  # its blocks; sequences are those of the batch
    positions: Sequence[int] | NDArray[np.int64] = ()  # absolute position of each row
    tokens: Sequence[int] = ()
    """Token ids of the rows; none if they are drafted or the pass has none."""

    logit_rows: Sequence[int] = ()
    """Rows that need logits; none if they are those of the newest level."""

    inputs: StateRows | None = None  # hidden states of the rows


@dataclass(frozen=True)
class HostDraft:
    """What the passes of a draft read."""

    passes: Sequence[HostPass]  # in order
    caches: Sequence[KVCacheView]  # KV by sequence
    contexts: Sequence[Context] = ()  # by sequence, for a model that attends to contexts


def text_pass(parts: Sequence[PassPart], inputs: StateRows | None = None) -> HostPass:
    """Return the pass over the parts of several generations, with hidden states of its rows."""
    stops = accumulate(len(part.tokens) for part in parts)
    counts = [part.logit_rows for part in parts]
    return HostPass(
        [each for part in parts for each in part.blocks],
        [position for part in parts for position in part.positions],
        [token for part in parts for token in part.tokens],
        [r for stop, n in zip(stops, counts, strict=True) for r in range(stop - n, stop)],
        inputs,
    )


def level_passes(starts: Sequence[int], lengths: Sequence[int], shape: TreeShape) -> list[HostPass]:
    """Return the passes for all levels but the first: over all nodes so far.

    Args:
        starts: Cache slot of the first node, by sequence.
        lengths: Its position.
        shape: Of the trees.
    """
    found, first = [], np.array(starts, np.int64)
    for level in range(1, len(shape.sizes)):
        block = LevelBlock(0, starts[0], None, shape.stops[level], levels=shape.sizes[:level])
        positions = np.add.outer(lengths, block.depths).ravel()
        found.append(HostPass(EqualBlocks(block, first), positions))
    return found


class Passes:
    """The passes of a draft on the device, sent there one by one."""

    def __init__(self, draft: HostDraft, device: torch.device) -> None:
        self._passes, self._device = draft.passes, device
        self.caches = draft.caches  # KV of each sequence
        self.contexts = draft.contexts  # contexts of each sequence

    def plan(self, index: int, ancestors: Tensor | None = None) -> TreePlan | None:
        """Return the plan of a pass, None if it has no rows; ``ancestors`` as in
        :class:`~paceline.kernels.TreePlan`."""
        each = self._passes[index]
        if not each.blocks:
            return None
        return plan_trees(
            each.blocks, positions=each.positions, device=self._device, ancestors=ancestors
        )

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


def rank_on_device(rankers: Sequence[Ranker], lengths: Sequence[int], shape: TreeShape) -> Rank:
    """Return what ranks candidates for sequences with texts of some lengths."""

    def rank(logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        parents = len(logits) // len(rankers)
        params = [each.params for each in rankers for _ in range(parents)]
        positions = [length + level for length in lengths for _ in range(parents)]
        drafted = rankers[0].drafted_on_device
        return rank_rows(logits[:, : shape.count], params, positions, drafted, shape.widths[level])

    return rank


class DeviceTrees:
    """One tree of each of S sequences, on their device."""

    def __init__(
        self, shape: TreeShape, last: Tensor, rank: Rank, *, kernels: bool = False
    ) -> None:
        """Begin trees.

        Args:
            shape: Their shape.
            last: Index of the worst node that fits each budget, among those sorted by score, int64
                ``[S, 1]``, at most N - 1.
            rank: Ranks candidates.
            kernels: Whether a Triton kernel adds the levels.
        """
        self._shape, self._last, self._rank, self._kernels = shape, last, rank, kernels
        trees, nodes, device = len(last), shape.stops[-1], last.device
        self.level = 0  # levels so far
        self.tokens = torch.zeros(trees, nodes, dtype=torch.int64, device=device)
        """Token ids of the nodes, int64 ``[S, N]``, level by level."""
        self.parents = torch.full((trees, nodes), -1, dtype=torch.int64, device=device)
        """Their parents' numbers, int64 ``[S, N]``; -1: the anchor."""
        self._scores = torch.full((2, trees, nodes), -torch.inf, dtype=torch.float64, device=device)
        self._above = torch.zeros(trees, 1, dtype=torch.float64, device=device)
        """Scores of the nodes that get children; -inf for the others of the newest level."""
        self.paths: Tensor | None = None
        """Paths of all nodes to themselves, bool ``[S, N, N]``; None if no pass is over nodes."""

    @property
    def grows(self) -> bool:
        return self.level < len(self._shape.sizes)

    @property
    def newest(self) -> slice:
        """Numbers of the newest level's nodes."""
        return slice(self._shape.stops[self.level - 1], self._shape.stops[self.level])

    def begin_paths(self) -> Tensor:
        """Keep paths from now on. Returns those of trees whose nodes have no parents."""
        trees, nodes = self.tokens.shape
        alone = torch.eye(nodes, dtype=torch.bool, device=self.tokens.device)
        self.paths = alone.repeat(trees, 1, 1)
        return self.paths

    def next_pass(self, passes: Passes) -> tuple[Tensor, TreePlan, Tensor]:
        """Return tokens, plan and logit rows of the pass for the next level, if the first pass is
        over the texts and the others are :func:`level_passes`."""
        level, stop, trees = self.level, self._shape.stops[self.level], len(self.tokens)
        device = self._last.device
        paths = self.begin_paths() if self.paths is None else self.paths
        plan = passes.plan(level, paths[:, :stop, :stop] if level else None)
        assert plan is not None
        if not level:
            return passes.tokens(0), plan, passes.logit_rows(0)
        rows = torch.arange(trees * stop, device=device).view(-1, stop)
        return self.tokens[:, :stop].flatten(), plan, rows[:, self.newest].flatten()

    def add_level(self, logits: Tensor, log_confidences: Tensor | None = None) -> None:
        """Add a level as :meth:`~paceline.drafter.growth.beam.Beam.add_level` does.

        Args:
            logits: After each node of the newest level, or after the anchors, ``[S F, V]`` or of
                drafted tokens alone.
            log_confidences: Of a confidence head for each of them, float64 ``[S, F]``.
        """
        candidates = self._rank(logits, self.level)
        add = self._add_by_kernel if self._kernels else self._add
        add(candidates, self._shape.stops[self.level], log_confidences)

    def _add_by_kernel(
        self, candidates: tuple[Tensor, Tensor], first: int, log_confidences: Tensor | None
    ) -> None:
        from paceline.kernels.triton.candidates import grow_trees

        self._above = grow_trees(
            candidates, self._above, self._last, (self.tokens, self.parents, self._scores),
            self.paths, first, self._shape.sizes[self.level],
            min_score=self._shape.min_score, chain=self._shape.chain, confidences=log_confidences,
        )  # fmt: skip
        self.level += 1

    def _add(
        self, candidates: tuple[Tensor, Tensor], first: int, log_confidences: Tensor | None
    ) -> None:
        trees, parents = len(self._last), len(candidates[0]) // len(self._last)
        ids, logs = (each.view(trees, parents, -1) for each in candidates)
        logs = logs.double()
        if log_confidences is not None:
            change = log_confidences - logs[..., 0]
            change = change if self._shape.chain else change.clamp(max=0.0)
            logs = logs + change.nan_to_num(0.0, 0.0, 0.0)[..., None]
        logs = logs.clamp(max=0.0)
        scores = (self._above[..., None] + logs).flatten(1)
        best, order = scores.sort(dim=1, descending=True, stable=True)
        size = self._shape.sizes[self.level]
        best, order = best[:, :size], order[:, :size]
        of = order // ids.shape[2]
        self.level += 1
        new = self.newest
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
        self._above = torch.where(expanded, best, -torch.inf)

    def packed(self) -> Tensor:
        """Return token, parent, score and log of the confidence of each node, float64
        ``[S, N, 4]``."""
        return torch.stack([self.tokens.double(), self.parents.double(), *self._scores], -1)


def read_trees(packed: Tensor, budgets: Sequence[Budget], shape: TreeShape) -> list[TokenTree]:
    """Return the best nodes of each tree within its budget, sorted by falling survival.

    Args:
        packed: See :meth:`DeviceTrees.packed`; on the CPU, of trees with enough levels.
        budgets: Of each tree.
        shape: Of all trees.
    """
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
    columns = [each.tolist() for each in (tokens, parents, chances)]
    return [
        TokenTree(*(tuple(column[index][:count]) for column in columns))
        for index, count in enumerate(counts.tolist())
    ]


class DeviceModel(Protocol):
    """A model whose trees grow on its device."""

    @property
    def method(self) -> str:
        """Name of its method."""

    def draft_passes(self, growing: Sequence[Any], shape: TreeShape) -> HostDraft:
        """Return the passes of a draft for generations whose trees have this shape."""

    def drafted(self, growing: Sequence[Any]) -> None:
        """Note that the passes for generations were launched."""

    def grow_on_device(self, passes: Passes, trees: DeviceTrees) -> None:
        """Grow trees by these passes, without waiting for the device."""


class Graphs(Protocol):
    """Captured drafts, :class:`~paceline.drafter.growth.graphs.DraftGraphs`."""

    def __len__(self) -> int:
        """Graphs captured so far."""

    def warm_up(self) -> None:
        """Capture the graphs of all batches. Raises ``DeviceLost`` if the device fails every call
        since."""

    def run(
        self,
        draft: HostDraft,
        rankers: Sequence[Ranker],
        lengths: Sequence[int],
        last: Sequence[int],
    ) -> Tensor | None:
        """Draft for a batch; None if no graph can."""


class DeviceGrowth(Growth):
    """Growth of trees whose candidates do not depend on the path before them."""

    at_once: ClassVar[bool] = True

    def __init__(
        self,
        model: DeviceModel,
        settings: TreeSettings,
        *,
        kernels: bool = False,
        graphs: Graphs | None = None,
    ) -> None:
        """Set the model.

        Args:
            model: Its passes. It owns the growth, which does not keep it in memory.
            settings: Of its trees.
            kernels: Whether a Triton kernel adds the levels.
            graphs: Runs captured drafts; None if there are none.
        """
        self._model: DeviceModel = weakref.proxy(model)
        self._settings, self._kernels = settings, kernels
        self.graphs = graphs

    def warm_up(self) -> None:
        """Capture the CUDA graphs of all batches. One that cannot be captured is left out: its
        batches are drafted for kernel by kernel. Raises ``DeviceLost``: the device fails every call
        since."""
        if self.graphs is None:
            return
        self.graphs.warm_up()
        if not len(self.graphs):
            self.graphs = None  # trees then have no more levels than a batch asks for

    def start(self, passes: TextPasses) -> bool:
        text = passes.text
        text.on_device = not text.ranker.by_paths
        return text.on_device

    def begin(self, passes: TextPasses, limits: Budget, ahead: Chain | None) -> None:
        passes.text.begin_beam(limits, ahead)

    def grow(self, rounds: Sequence[tuple[TextPasses, Budget]]) -> list[TokenTree]:
        batches: dict[int, list[TextPasses]] = {}
        for passes, _ in rounds:
            batches.setdefault(passes.text.ranker.count, []).append(passes)
        found: dict[TextPasses, TokenTree] = {}
        for batch in batches.values():  # one, but for services of targets with other vocabularies
            with torch.inference_mode():
                found.update(zip(batch, self._grow(batch), strict=True))
        return [found[passes] for passes, _ in rounds]

    def _grow(self, batch: Sequence[TextPasses]) -> list[TokenTree]:
        texts = [passes.text for passes in batch]
        limits = [text.tree.limits for text in texts]
        depth = max(each.depth for each in limits)
        levels = depth if self.graphs is None else self._settings.max_depth
        shape = TreeShape.of(self._settings.options, levels, texts[0].ranker.count)
        rankers, lengths = [text.ranker for text in texts], [text.length for text in texts]
        last = [min(each.nodes, shape.stops[-1]) - 1 for each in limits]
        draft = self._model.draft_passes(batch, shape)
        nodes = None if self.graphs is None else self.graphs.run(draft, rankers, lengths, last)
        if nodes is None:
            device = self._settings.device
            worst = send(torch.tensor(last)[:, None], device)
            rank = rank_on_device(rankers, lengths, shape)
            trees = DeviceTrees(shape, worst, rank, kernels=self._kernels)
            self._model.grow_on_device(Passes(draft, device), trees)
            nodes = trees.packed().cpu()
        self._model.drafted(batch)
        return read_trees(nodes, limits, shape)
