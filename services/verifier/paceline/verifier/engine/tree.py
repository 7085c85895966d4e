"""The tree of one round, made ready for one block of the packed forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.kernels import Proposal

_SURE = 0.98  # no confidence counts for more: what is learnt of a drafter can only lower survivals
UNTOLD = 0.6
"""Chance that one of a node's children stands, where no drafter says."""


class DraftTree:
    """A drafted tree with its anchor, equal siblings merged.

    Node 0 is the anchor; the others follow in topological order. Two drafted nodes with the same
    token under the same parent say the same thing, so they become one node: ``children`` is then
    a plain lookup, and nothing is computed twice.

    Attributes:
        tokens: Token of each node but the anchor; ``tokens[i - 1]`` is node i.
        parents: Parent node of each node, -1 for the anchor.
        depths: Depth of each node, 0 for the anchor.
        children: Node below (node, token).
        proposals: What each node but the anchor was drawn from, for rejection sampling of a chain;
            empty: every node is taken for a certainty.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        confidences: Sequence[float] = (),
        proposals: Sequence[Proposal] = (),
    ) -> None:
        """Merge a drafted tree.

        Args:
            tokens: Token of each drafted node.
            parents: Index of each drafted node's parent, lower than its own; -1 is the anchor.
            confidences: Chance of each drafted node to be accepted if its parent is; or none.
            proposals: See the class; only for a chain.
        """
        self.proposals = proposals
        self.tokens: list[int] = []
        self.parents: list[int] = [-1]
        self.depths: list[int] = [0]
        self.children: dict[tuple[int, int], int] = {}
        self._drafted: list[int] = [-1]
        self._drafted_parents = parents
        self._confidences = confidences
        nodes: list[int] = []
        for index, token in enumerate(tokens):
            parent = nodes[parents[index]] if parents[index] >= 0 else 0
            node = self.children.setdefault((parent, token), len(self.parents))
            if node == len(self.parents):
                self.tokens.append(token)
                self.parents.append(parent)
                self.depths.append(self.depths[parent] + 1)
                self._drafted.append(index)
            nodes.append(node)

    def __len__(self) -> int:
        """Number of nodes, anchor included."""
        return len(self.parents)

    @cached_property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(self.depths)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node is the child of the one before it."""
        return self.depth == len(self) - 1

    def drafted_path(self, path: Sequence[int]) -> list[int]:
        """Indices in the tree as it was drafted of a path of nodes that starts below the anchor."""
        drafted: list[int] = []
        index = self._drafted[path[-1]] if path else -1
        while index >= 0:
            drafted.append(index)
            index = self._drafted_parents[index]
        return drafted[::-1]

    @cached_property
    def survivals(self) -> NDArray[np.float64]:
        """Chance of each node but the anchor to be accepted, in [0, 1); falls along every path.

        As the drafter told, or a guess that siblings share.
        """
        chances = [1.0] * len(self)
        told = self._confidences
        siblings = None if told else np.bincount(self.parents[1:], minlength=len(self))
        for node in range(1, len(self)):
            parent = self.parents[node]
            if siblings is None:
                chance = min(told[self._drafted[node]], _SURE)
            else:
                chance = UNTOLD / siblings[parent]
            chances[node] = chances[parent] * chance
        return np.array(chances[1:])

    def likeliest_first(self) -> DraftTree:
        """This tree with its nodes sorted by survival, parents still before their children."""
        survivals = self.survivals
        if len(survivals) < 2 or bool((survivals[1:] <= survivals[:-1]).all()):
            return self
        return self._part([node + 1 for node in np.argsort(-survivals, kind="stable").tolist()])

    def first(self, count: int) -> DraftTree:
        """This tree with only its first ``count`` nodes, the anchor not counted."""
        return self if count >= len(self) - 1 else self._part(range(1, count + 1))

    def up_to_depth(self, depth: int) -> DraftTree:
        """This tree without the nodes below ``depth``."""
        if depth >= self.depth:
            return self
        return self._part(node for node in range(1, len(self)) if self.depths[node] <= depth)

    def _part(self, chosen: Iterable[int]) -> DraftTree:
        """A tree of these nodes, in this order, which has parents before their children; indices
        of the drafted tree stay."""
        kept = DraftTree((), self._drafted_parents, self._confidences, self.proposals)
        nodes = {0: 0}
        for node in chosen:
            nodes[node] = len(kept)
            parent = nodes[self.parents[node]]
            kept.children[parent, self.tokens[node - 1]] = len(kept)
            kept.tokens.append(self.tokens[node - 1])
            kept.parents.append(parent)
            kept.depths.append(self.depths[node])
            kept._drafted.append(self._drafted[node])
        if "survivals" in self.__dict__:
            kept.__dict__["survivals"] = self.survivals[[node - 1 for node in list(nodes)[1:]]]
        return kept


NO_TREE = DraftTree((), ())
"""The anchor alone: a plain decoding step."""
