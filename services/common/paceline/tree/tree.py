"""The token tree of one round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from paceline.v1 import tree_pb2

if TYPE_CHECKING:
    from paceline.kernels import Proposal

MAX_NODES = 255
"""Maximum number of nodes that the verifier accepts. With the anchor they fill one block of the
attention."""

DEFAULT_CONFIDENCE = 0.6
"""Probability that one of a node's children is accepted, for a tree without confidences."""

_MAX_LISTED = 4096  # maximum number of tokens that the distribution of one node may list


class TreeError(ValueError):
    """A tree, or a distribution in it, is malformed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason  # stable name of the fault, as in the protocol's errors


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens under the anchor, parents before their children.

    An immutable value that threads may share. The constructor checks nothing, so that builders,
    which make valid trees, cost no time; :meth:`check` does.

    The anchor is not a node of the tree: its index is -1, its depth 0. Of siblings with the same
    token only the first is ever accepted.
    """

    tokens: tuple[int, ...] = ()  # token id of each node
    parents: tuple[int, ...] = ()
    """For each node the index of its parent, lower than its own, or -1 for the anchor."""

    confidences: tuple[float, ...] = ()
    """Empty, or for each node the probability in [0, 1] that it is accepted given that its parent
    is."""

    proposals: tuple[Proposal, ...] = ()
    """For rejection sampling of a chain, the distribution that each node was drawn from; empty: the
    nodes were not drawn."""

    sources: tuple[str, ...] = field(default=(), compare=False)
    """Empty, or for each node the name of the source that proposed it, the first one where several
    did; empty: a drafter. They are for statistics and are no part of the message."""

    @classmethod
    def chain(
        cls, tokens: Sequence[int], confidences: Sequence[float] = (), *, source: str = ""
    ) -> TokenTree:
        """Return a tree of one path, proposed by ``source``."""
        parents = tuple(range(-1, len(tokens) - 1))
        sources = (source,) * len(tokens) if source else ()
        return cls(tuple(tokens), parents, tuple(confidences), (), sources)

    @classmethod
    def from_proto(cls, message: tree_pb2.TokenTree, max_nodes: int | None = None) -> TokenTree:
        """Read a message, whose confidences and probabilities are float32. Call :meth:`check` on a
        tree from another process. Raises ``TreeError``: the tree has more than ``max_nodes`` nodes
        (None: any number), or a distribution is malformed."""
        nodes = len(message.tokens)
        if max_nodes is not None and nodes > max_nodes:
            raise TreeError(
                "TREE_TOO_LARGE",
                f"the tree has {nodes} nodes, expected at most {max_nodes}; draft fewer",
            )
        _check_length("distributions", message.distributions, nodes)
        return cls(
            tuple(message.tokens),
            tuple(message.parents),
            tuple(message.confidences),
            tuple(_read_proposal(*entry) for entry in enumerate(message.distributions)),
        )

    def to_proto(self) -> tree_pb2.TokenTree:
        """Write the message."""
        message = tree_pb2.TokenTree(
            tokens=self.tokens, parents=self.parents, confidences=self.confidences
        )
        for proposal in self.proposals:
            message.distributions.add(
                tokens=proposal.tokens.tolist(), probabilities=proposal.probabilities.tolist()
            )
        return message

    def __len__(self) -> int:
        """Return the number of nodes, the anchor not counted."""
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; 1 for a child of the anchor."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """Length of the longest path. Unit: tokens."""
        return max(self.depths, default=0)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node is the child of the one before it."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def acceptance_probabilities(self) -> tuple[float, ...]:
        """Probability of each node to be accepted if its parent is.

        The confidences; in a tree without any, siblings share :data:`DEFAULT_CONFIDENCE`.
        """
        if self.confidences:
            return self.confidences
        siblings = Counter(self.parents)
        return tuple(DEFAULT_CONFIDENCE / siblings[parent] for parent in self.parents)

    @cached_property
    def survivals(self) -> tuple[float, ...]:
        """Probability of each node to be accepted.

        The product of the acceptance probabilities along its path, so it never rises along one.
        """
        survivals: list[float] = []
        for parent, chance in zip(self.parents, self.acceptance_probabilities, strict=True):
            survivals.append(chance if parent < 0 else survivals[parent] * chance)
        return tuple(survivals)

    @cached_property
    def _index(self) -> dict[tuple[int, int], int]:
        index: dict[tuple[int, int], int] = {}
        for node, key in enumerate(zip(self.parents, self.tokens, strict=True)):
            index.setdefault(key, node)
        return index

    def child(self, node: int, token: int) -> int | None:
        """Return the first child of ``node`` (-1: the anchor) with this token, if there is one."""
        return self._index.get((node, token))

    def children(self, node: int) -> tuple[int, ...]:
        """Return the indices of the children of ``node`` (-1: the anchor), in order."""
        return tuple(i for i, parent in enumerate(self.parents) if parent == node)

    def path(self, node: int) -> tuple[int, ...]:
        """Return tokens from the anchor's child down to ``node``."""
        tokens = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def best_chain(self) -> TokenTree:
        """Return the path of the likeliest child at each node; this tree if it is a chain."""
        if self.is_chain:
            return self
        nodes: list[int] = []
        while children := self.children(nodes[-1] if nodes else -1):
            nodes.append(max(children, key=lambda node: self.survivals[node]))
        return self.subtree(nodes)

    def first(self, count: int) -> TokenTree:
        """Return the tree of the first ``count`` nodes."""
        return self if count >= len(self) else self.subtree(range(count))

    def subtree(self, nodes: Iterable[int]) -> TokenTree:
        """Return the tree of some nodes, in the given order, with parents before children."""
        nodes = tuple(nodes)
        tokens, parents, confidences = self.tokens, self.parents, self.confidences
        new = {node: index for index, node in enumerate(nodes)}
        new[-1] = -1
        # Lists: each generator would cost a frame, for every tree of a step.
        return TokenTree(
            tuple([tokens[node] for node in nodes]),
            tuple([new[parents[node]] for node in nodes]),
            tuple([confidences[node] for node in nodes]) if confidences else (),
            tuple([self.proposals[node] for node in nodes]) if self.proposals else (),
            tuple([self.sources[node] for node in nodes]) if self.sources else (),
        )

    def check(self, vocab_size: int | None = None) -> None:
        """Check that the tree is well-formed. ``vocab_size``: number of token ids; None: any token
        id of 0 or more is accepted. Raises ``TreeError``: lengths differ, a parent does not come
        before its child, a token is outside the vocabulary, or a confidence outside [0, 1]."""
        nodes = len(self)
        if len(self.parents) != nodes:
            raise _bad_tree(f"the tree has {nodes} tokens but {len(self.parents)} parents")
        _check_length("confidences", self.confidences, nodes)
        _check_length("distributions", self.proposals, nodes)
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise _bad_tree(
                    f"the parent of node {node} is {parent}, expected -1 to {node - 1}: nodes must "
                    "be in topological order"
                )
        for node, confidence in enumerate(self.confidences):
            if not 0 <= confidence <= 1:  # also false for NaN
                raise _bad_tree(
                    f"the confidence of node {node} is {confidence}, expected a probability in "
                    "[0, 1]"
                )
        _check_tokens("the tree", self.tokens, vocab_size)
        for node, proposal in enumerate(self.proposals):
            _check_tokens(f"the distribution of node {node}", proposal.tokens.tolist(), vocab_size)

    def check_samples(self, seed: int, position: int) -> None:
        """Check that the tree is a chain of samples, which rejection sampling needs to be exact, by
        the seed of the generation and the absolute position of the first node.

        Each token must be the one that its distribution and the noise of its position give. A tree
        without distributions passes: any token is a sample of the distribution that is certain.
        Raises ``TreeError``: the tree is not a chain, or a token is not the sample of its
        distribution.
        """
        if not self.is_chain:
            raise _bad_tree("with REJECTION a tree must be a chain; draft one token a level")
        for node, (token, proposal) in enumerate(zip(self.tokens, self.proposals, strict=False)):
            sample = proposal.draw(seed, position + node)
            if sample != token:
                raise TreeError(
                    "NOT_A_SAMPLE",
                    f"node {node} is token {token}, expected {sample}, the sample of its "
                    f"distribution at position {position + node}; does the drafter have the same "
                    "seed and text?",
                )


EMPTY = TokenTree()  # the tree without nodes


def _read_proposal(node: int, message: tree_pb2.NodeDistribution) -> Proposal:
    # Imports torch, which a service that never receives a distribution does without.
    from paceline.kernels import Proposal

    if len(message.tokens) > _MAX_LISTED:
        raise TreeError(
            "BAD_DISTRIBUTION",
            f"the distribution of node {node} lists {len(message.tokens)} tokens, expected at "
            f"most {_MAX_LISTED}; send the likeliest",
        )
    try:
        return Proposal.checked(message.tokens, message.probabilities)
    except ValueError as error:
        raise TreeError(
            "BAD_DISTRIBUTION", f"the distribution of node {node} is malformed: {error}"
        ) from error


def _check_length(name: str, values: Sequence[object], nodes: int) -> None:
    if len(values) not in (0, nodes):
        raise _bad_tree(
            f"the tree has {nodes} tokens but {len(values)} {name}; send none, or one a node"
        )


def _check_tokens(where: str, tokens: Sequence[int], vocab_size: int | None) -> None:
    low, high = min(tokens, default=0), max(tokens, default=0)
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        raise TreeError(
            "TOKEN_OUT_OF_VOCABULARY",
            f"{where} holds token {low if low < 0 else high}, expected token ids of 0 or more"
            + ("" if vocab_size is None else f" and below {vocab_size}")
            + "; does the drafter use the target's tokenizer?",
        )


def _bad_tree(message: str) -> TreeError:
    return TreeError("BAD_TREE", message)
