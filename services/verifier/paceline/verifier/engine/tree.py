"""The tree of one round, made ready for one block of the packed forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from paceline.kernels import Proposal


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
        proposals: Sequence[Proposal] = (),
    ) -> None:
        """Merge a drafted tree.

        Args:
            tokens: Token of each drafted node.
            parents: Index of each drafted node's parent, lower than its own; -1 is the anchor.
            proposals: See the class; only for a chain.
        """
        self.proposals = proposals
        self.tokens: list[int] = []
        self.parents: list[int] = [-1]
        self.depths: list[int] = [0]
        self.children: dict[tuple[int, int], int] = {}
        self._drafted: list[int] = [-1]
        self._drafted_parents = parents
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

    def up_to_depth(self, depth: int) -> DraftTree:
        """This tree without the nodes below ``depth``; indices of the drafted tree stay."""
        if depth >= self.depth:
            return self
        kept = DraftTree((), self._drafted_parents, self.proposals)
        nodes = {0: 0}
        for node in range(1, len(self)):
            if self.depths[node] > depth:
                continue
            nodes[node] = len(kept)
            parent = nodes[self.parents[node]]
            kept.children[parent, self.tokens[node - 1]] = len(kept)
            kept.tokens.append(self.tokens[node - 1])
            kept.parents.append(parent)
            kept.depths.append(self.depths[node])
            kept._drafted.append(self._drafted[node])
        return kept


NO_TREE = DraftTree((), ())
"""The anchor alone: a plain decoding step."""
