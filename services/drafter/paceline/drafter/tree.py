"""The drafted tree: what every method returns and the verifier checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from paceline.v1 import tree_pb2

if TYPE_CHECKING:
    from paceline.kernels import Proposal


@dataclass(frozen=True)
class Tree:
    """Token guesses under the anchor, parents before children.

    A plain immutable value: it may be shared between threads. Construction checks nothing, because
    builders make valid trees and a round has no time to lose; :meth:`check` does.

    Attributes:
        tokens: Token id of each node.
        parents: For each node the index of its parent, lower than its own, or -1 for the anchor.
        confidences: Empty, or for each node the probability in [0, 1] that it is accepted given
            that its parent is.
        proposals: What each node of a chain was drawn from, for rejection sampling; empty: the
            nodes were not drawn.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    proposals: tuple[Proposal, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; 1 for a child of the anchor."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Length of the longest path, in tokens; 0 for an empty tree."""
        return max(self.depths, default=0)

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from the anchor's child down to ``node``."""
        tokens = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def children(self, node: int) -> tuple[int, ...]:
        """Indices of the children of ``node`` (-1: the anchor), in order."""
        return tuple(i for i, parent in enumerate(self.parents) if parent == node)

    def best_chain(self) -> Tree:
        """The path of the likeliest child after child; this tree if it is a chain."""
        if self.parents == tuple(range(-1, len(self) - 1)):
            return self
        path: list[int] = []
        while children := self.children(path[-1] if path else -1):
            path.append(max(children, key=self.survival))
        likely = [self.confidences[node] for node in path] if self.confidences else ()
        return chain([self.tokens[node] for node in path], likely)

    def survival(self, node: int) -> float:
        """Product of the confidences on the path of ``node``; 1 where the tree has none."""
        product = 1.0
        while node >= 0 and self.confidences:
            product *= self.confidences[node]
            node = self.parents[node]
        return product

    def check(self, vocab_size: int | None = None) -> None:
        """Check everything the verifier will check.

        Raises:
            ValueError: Lengths differ, a parent does not stand before its child, a token lies
                outside the vocabulary, or a confidence outside [0, 1].
        """
        if len(self.parents) != len(self.tokens):
            raise ValueError(
                f"tree has {len(self.tokens)} tokens but {len(self.parents)} parents; give one each"
            )
        if self.confidences and len(self.confidences) != len(self.tokens):
            raise ValueError(
                f"tree has {len(self.tokens)} tokens but {len(self.confidences)} confidences; "
                "give none or one each"
            )
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(
                    f"parents[{node}] is {parent}, expected -1 to {node - 1}: "
                    "nodes must be in topological order"
                )
        for node, token in enumerate(self.tokens):
            if token < 0 or (vocab_size is not None and token >= vocab_size):
                raise ValueError(f"tokens[{node}] is {token}, expected 0 to {vocab_size} - 1")
        for node, confidence in enumerate(self.confidences):
            if not (math.isfinite(confidence) and 0.0 <= confidence <= 1.0):
                raise ValueError(f"confidences[{node}] is {confidence}, expected 0 to 1")

    def to_proto(self) -> tree_pb2.TokenTree:
        """The tree as it travels."""
        message = tree_pb2.TokenTree(
            tokens=self.tokens, parents=self.parents, confidences=self.confidences
        )
        for proposal in self.proposals:
            message.distributions.add(
                tokens=proposal.tokens.tolist(), probabilities=proposal.probabilities.tolist()
            )
        return message

    @classmethod
    def from_proto(cls, message: tree_pb2.TokenTree) -> Tree:
        """A tree as it arrived, unchecked and without proposals; confidences are float32."""
        return cls(tuple(message.tokens), tuple(message.parents), tuple(message.confidences))


EMPTY = Tree()
"""Nothing worth checking."""


def chain(tokens: Sequence[int], confidences: Sequence[float] = ()) -> Tree:
    """A tree of one path."""
    return Tree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(confidences))
