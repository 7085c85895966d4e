"""Trees of several sequences that grow on a GPU without the host, in fixed shapes.

Level l of every tree has a fixed number of nodes, the likeliest ones as in
:class:`~paceline.drafter.methods.beam.Beam`. Nodes that a tree does not have, because none may be
expanded that could be their parent, have the score -inf; they are computed too. The host reads all
trees once, when they are complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from paceline.drafter.methods.beam import Beam, Ranker, rank_rows
from paceline.kernels import LevelSegment, TreePlan, plan_trees, send


class TreesThere:
    """One tree of each of S sequences, on their device.

    Attributes:
        level: Levels so far.
        tokens: Token ids of the nodes, int64 ``[S, N]``, level by level.
        parents: Their parents' numbers, int64 ``[S, N]``; -1: the anchor.
    """

    def __init__(
        self,
        beams: Sequence[Beam],
        rankers: Sequence[Ranker],
        lengths: Sequence[int],
        widths: Sequence[int],
        min_survival: float,
        device: torch.device,
    ) -> None:
        """Begins trees.

        Args:
            beams: Empty trees, with their limits; :meth:`read` fills them.
            rankers: Rank the candidates of each; all of as many logits, by no paths.
            lengths: Tokens of each text.
            widths: Nodes of each level; the last number applies to all deeper levels.
            min_survival: Nodes less likely than this are not expanded.
            device: Where they are.
        """
        self._beams, self._lengths, self._device = beams, lengths, device
        self._params = [ranker.params for ranker in rankers]
        self._count, self._drafted = rankers[0].count, rankers[0].drafted_there
        self._min_score = math.log(min_survival) if min_survival > 0 else -math.inf
        depth = max(beam.limits.depth for beam in beams)
        self._widths = [widths[min(level, len(widths) - 1)] for level in range(depth)]
        self._chain = set(widths) == {1}
        sizes, before = [], 1
        for width in self._widths:
            before = min(width, before * min(width, self._count))
            sizes.append(before)
        self._sizes = tuple(sizes)
        self._stops = (0, *accumulate(sizes))
        rows, nodes = len(beams), self._stops[-1]
        last = [[min(beam.limits.nodes, nodes) - 1] for beam in beams]
        self._last = send(torch.tensor(last), device)
        self.level = 0
        self.tokens = torch.zeros(rows, nodes, dtype=torch.int64, device=device)
        self.parents = torch.full((rows, nodes), -1, dtype=torch.int64, device=device)
        self._scores = torch.full((2, rows, nodes), -torch.inf, dtype=torch.float64, device=device)
        self._above = torch.zeros(rows, 1, dtype=torch.float64, device=device)
        """Scores of the nodes that get children; -inf for the others of the newest level."""
        self._paths = torch.eye(nodes, dtype=torch.bool, device=device).repeat(rows, 1, 1)

    @property
    def grows(self) -> bool:
        """Whether a tree gets another level."""
        return self.level < len(self._sizes)

    @property
    def newest(self) -> slice:
        """Numbers of the newest level's nodes."""
        return slice(self._stops[self.level - 1], self._stops[self.level])

    @property
    def places(self) -> Tensor:
        """Places in the level before of the newest level's parents, int64 ``[S, F]``."""
        before = self._stops[self.level - 2] if self.level > 1 else -1
        return self.parents[:, self.newest] - before

    def add_level(self, logits: Tensor, log_confidences: Tensor | None = None) -> None:
        """Adds a level as :meth:`Beam.add_level` does.

        Args:
            logits: After each node of the newest level, or after the anchors, ``[S F, V]`` or of
                drafted tokens alone.
            log_confidences: Of a confidence head for each of them, float64 ``[S, F]``.
        """
        trees, parents = len(self._beams), len(logits) // len(self._beams)
        ids, logs = self._ranked(logits, parents)
        ids, logs = ids.view(trees, parents, -1), logs.view(trees, parents, -1).double()
        if log_confidences is not None:
            change = log_confidences - logs[..., 0]
            change = change if self._chain else change.clamp(max=0.0)
            logs = logs + change.nan_to_num(0.0, 0.0, 0.0)[..., None]
        logs = logs.clamp(max=0.0)
        scores = (self._above[..., None] + logs).flatten(1)
        best, order = scores.sort(dim=1, descending=True, stable=True)
        size, first = self._sizes[self.level], self._stops[self.level]
        best, order = best[:, :size], order[:, :size]
        of = order // ids.shape[2]
        self.level += 1
        new = self.newest
        self.tokens[:, new] = ids.flatten(1).gather(1, order)
        self._scores[0, :, new] = best
        self._scores[1, :, new] = logs.flatten(1).gather(1, order)
        if first:
            before = slice(self._stops[self.level - 2], first)
            self.parents[:, new] = of + before.start
            at = of[..., None].expand(-1, -1, first)
            self._paths[:, new, :first] = self._paths[:, before, :first].gather(1, at)
        expanded = (best >= self._min_score) & (best > self._worst())
        self._above = torch.where(expanded, best, -torch.inf)

    def plan(self, starts: Sequence[int]) -> TreePlan:
        """Returns the plan of a pass over all nodes of each tree; see :attr:`fed`.

        Args:
            starts: Cache slot of the first node, by tree.
        """
        stop = self._stops[self.level]
        levels = self._sizes[: self.level]
        segments = [
            LevelSegment(tree, start, None, stop, levels=levels)
            for tree, start in enumerate(starts)
        ]
        positions = [
            length + depth
            for length, segment in zip(self._lengths, segments, strict=True)
            for depth in segment.depths
        ]
        paths = self._paths[:, :stop, :stop]
        return plan_trees(segments, positions=positions, device=self._device, ancestors=paths)

    @property
    def fed(self) -> Tensor:
        """Tokens of a pass over all nodes, int64 ``[S n]``."""
        return self.tokens[:, : self._stops[self.level]].flatten()

    @property
    def logit_rows(self) -> Tensor:
        """Rows of such a pass that need logits, int64 ``[S F]``."""
        count = len(self._beams) * self._stops[self.level]
        rows = torch.arange(count, device=self._device).view(len(self._beams), -1)
        return rows[:, self.newest].flatten()

    def read(self) -> None:
        """Fills the trees of the host: the only wait for the device."""
        numbers = torch.stack([self.tokens.double(), self.parents.double(), *self._scores], -1)
        for beam, nodes in zip(self._beams, numbers.cpu().tolist(), strict=True):
            beam.add_nodes(nodes, self._stops[beam.limits.depth])

    def _ranked(self, logits: Tensor, parents: int) -> tuple[Tensor, Tensor]:
        params = [each for each in self._params for _ in range(parents)]
        positions = [length + self.level for length in self._lengths for _ in range(parents)]
        width = self._widths[self.level]
        return rank_rows(logits[:, : self._count], params, positions, self._drafted, width)

    def _worst(self) -> Tensor:
        """Score of the worst node that still fits each budget, ``[S, 1]``; -inf where all do."""
        return self._scores[0].sort(descending=True).values.gather(1, self._last)
