"""A token tree that grows level by level, each level by one forward pass over its frontier."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.drafter.methods.base import Budget
from paceline.drafter.methods.ranking import Ranked
from paceline.drafter.tree import Tree
from paceline.kernels import Proposal


class Beam:
    """The tree of one sequence in one round.

    Dynamic beam: each level keeps the likeliest paths over all its parents, and only nodes that
    could still be among the ``nodes`` best of the whole tree are expanded (after EAGLE-2, section
    4). A node's score is the log of its survival. Nodes of a level are sorted by score, so that
    those to be expanded, the frontier, come first.

    Nodes are numbered as they are added. A forward pass is fed nodes ``trunk`` to ``frontier.stop``
    as a tree block whose node i lies in cache slot ``start + i``; the trunk, leading levels of one
    node each that were fed before, needs no second pass.
    """

    def __init__(self, budget: Budget, widths: Sequence[int], min_survival: float) -> None:
        """Start with the anchor alone.

        Args:
            budget: Most nodes and depth of the outcome.
            widths: Nodes of each level; the last number holds for deeper ones.
            min_survival: Nodes less likely than this are not expanded.
        """
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self.logs: list[float] = []
        self.proposals: list[Proposal] = []
        self.level = 0
        """Levels so far."""
        self.frontier = range(0)
        """Nodes to be expanded next."""
        self.trunk = 0
        self.fed = 0
        """Nodes below this have been fed: their KV is in the cache."""
        self._budget = budget
        self._widths = widths
        self._floor = math.log(min_survival) if min_survival > 0 else -math.inf

    @property
    def width(self) -> int:
        """Nodes of the next level."""
        return self._widths[min(self.level, len(self._widths) - 1)]

    @property
    def wants_level(self) -> bool:
        """Whether a forward pass over the frontier pays."""
        return self.level < self._budget.depth and (self.level == 0 or len(self.frontier) > 0)

    def block(self) -> tuple[list[int], tuple[int, ...]]:
        """Tokens and parents of the block to feed; its last nodes are the frontier."""
        part = slice(self.trunk, self.frontier.stop)
        parents = tuple(max(-1, parent - self.trunk) for parent in self.parents[part])
        return self.tokens[part], parents

    def fed_block(self) -> None:
        """The block was fed."""
        self.fed = self.frontier.stop
        if len(self.tokens) == self.level:  # one node a level until now
            self.trunk = self.fed

    def add_level(self, ranked: Ranked) -> None:
        """Add children of the frontier: choices after each of its nodes (the anchor at first)."""
        parents = self.frontier if self.level else range(-1, 0)
        width = self.width
        found: list[tuple[float, float, int, int]] = []
        for parent, row_ids, row_logs in zip(
            parents, ranked.ids.tolist(), ranked.logs.tolist(), strict=True
        ):
            above = self.scores[parent] if parent >= 0 else 0.0
            # Rounding may leave the log of a probability a little above 0.
            found += [
                (above + min(log, 0.0), min(log, 0.0), parent, token)
                for token, log in zip(row_ids, row_logs, strict=True)
                if log > -math.inf
            ]
        found.sort(key=lambda child: -child[0])
        start = len(self.tokens)
        for score, log, parent, token in found[:width]:
            self.tokens.append(token)
            self.parents.append(parent)
            self.scores.append(score)
            self.logs.append(log)
        if ranked.proposal is not None:
            self.proposals.append(ranked.proposal)
        self.level += 1
        bar = max(self._floor, self._bar())
        stop = start
        while stop < len(self.scores) and self.scores[stop] >= bar:
            stop += 1
        self.frontier = range(start, stop)

    def tree(self) -> Tree:
        """The best nodes within the budget, sorted by falling survival."""
        # A child scores no more than its parent and has a higher number: parents come first.
        best = sorted(range(len(self.tokens)), key=lambda node: (-self.scores[node], node))
        best = best[: self._budget.nodes]
        place = {node: index for index, node in enumerate(best)}
        return Tree(
            tuple(self.tokens[node] for node in best),
            tuple(place[self.parents[node]] if self.parents[node] >= 0 else -1 for node in best),
            tuple(math.exp(self.logs[node]) for node in best),
            tuple(self.proposals[: len(best)]),  # of a chain, whose best nodes are its first
        )

    def fed_path(self, tokens: Sequence[int]) -> list[int]:
        """Nodes that these tokens walk down, as far as they have been fed."""
        children = {(self.parents[i], self.tokens[i]): i for i in range(self.fed)}
        path: list[int] = []
        node = -1
        for token in tokens:
            child = children.get((node, token))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def path(self, node: int) -> list[int]:
        """Tokens from the anchor's child down to ``node``."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def _bar(self) -> float:
        """Score of the worst node that still fits the budget."""
        if len(self.scores) < self._budget.nodes:
            return -math.inf
        return sorted(self.scores, reverse=True)[self._budget.nodes - 1]
