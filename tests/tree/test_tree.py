"""The token tree: paths, survivals, the message, validation."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import packages_after

from paceline.kernels import Proposal
from paceline.tree import DEFAULT_CONFIDENCE, EMPTY, TokenTree, TreeError, merge
from paceline.v1 import tree_pb2

VOCAB = 50


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 40, vocab: int = VOCAB) -> TokenTree:
    nodes = draw(st.integers(0, max_nodes))
    tokens = tuple(draw(st.integers(0, vocab - 1)) for _ in range(nodes))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(nodes))
    confidences: tuple[float, ...] = ()
    if draw(st.booleans()):
        confidences = tuple(draw(st.floats(0, 1, width=32)) for _ in range(nodes))
    return TokenTree(tokens, parents, confidences)


@given(trees())
def test_a_tree_passes_its_check_and_survives_the_wire(tree: TokenTree) -> None:
    tree.check(VOCAB)
    assert TokenTree.from_proto(tree.to_proto()) == tree


@given(trees())
def test_depths_paths_and_children_agree(tree: TokenTree) -> None:
    for node in range(len(tree)):
        parent, token = tree.parents[node], tree.tokens[node]
        assert len(tree.path(node)) == tree.depths[node]
        assert tree.path(node)[-1] == token
        assert node in tree.children(parent)
        same = [child for child in tree.children(parent) if tree.tokens[child] == token]
        assert tree.child(parent, token) == same[0]
    assert sum(len(tree.children(node)) for node in range(-1, len(tree))) == len(tree)
    assert tree.depth == max((len(tree.path(node)) for node in range(len(tree))), default=0)
    assert tree.child(-1, VOCAB) is None


@given(trees())
def test_survival_is_the_product_along_the_path(tree: TokenTree) -> None:
    for node, parent in enumerate(tree.parents):
        above = tree.survivals[parent] if parent >= 0 else 1.0
        own = DEFAULT_CONFIDENCE / len(tree.children(parent))
        if tree.confidences:
            own = tree.confidences[node]
        assert tree.survivals[node] == pytest.approx(above * own)


@given(trees(), st.data())
def test_a_subtree_keeps_paths_and_confidences(tree: TokenTree, data: st.DataObject) -> None:
    keep = data.draw(st.integers(0, len(tree)))
    nodes = sorted(range(len(tree)), key=lambda node: tree.depths[node])[:keep]
    part = tree.subtree(nodes)
    part.check(VOCAB)
    assert [part.path(node) for node in range(len(part))] == [tree.path(node) for node in nodes]
    if tree.confidences:
        assert part.confidences == tuple(tree.confidences[node] for node in nodes)
    assert tree.first(keep) == tree.subtree(range(keep))


def test_a_chain_is_one_path() -> None:
    chain = TokenTree.chain([3, 4, 5], [0.5, 0.5, 0.25])
    assert chain.is_chain
    assert chain.path(2) == (3, 4, 5)
    assert chain.survivals[2] == 0.0625
    assert TokenTree.chain([]) == EMPTY
    assert not TokenTree((1, 2), (-1, -1)).is_chain


def test_the_best_chain_takes_the_likeliest_child_at_each_node() -> None:
    tree = TokenTree((5, 6, 7, 8), (-1, -1, 1, 1), (0.4, 0.5, 0.3, 0.6))
    assert tree.best_chain() == TokenTree((6, 8), (-1, 0), (0.5, 0.6))
    chain = TokenTree.chain([1, 2])
    assert chain.best_chain() is chain


@pytest.mark.parametrize(
    ("tree", "reason", "message"),
    [
        (TokenTree((1, 2), (-1,)), "BAD_TREE", "2 tokens but 1 parents"),
        (TokenTree((1,), (0,)), "BAD_TREE", "topological"),
        (TokenTree((1, 2), (1, -1)), "BAD_TREE", "topological"),
        (TokenTree((1,), (-2,)), "BAD_TREE", "topological"),
        (TokenTree((VOCAB,), (-1,)), "TOKEN_OUT_OF_VOCABULARY", "token 50"),
        (TokenTree((-1,), (-1,)), "TOKEN_OUT_OF_VOCABULARY", "token -1"),
        (TokenTree((1,), (-1,), (0.5, 0.5)), "BAD_TREE", "2 confidences"),
        (TokenTree((1,), (-1,), (1.5,)), "BAD_TREE", "confidence of node 0"),
        (TokenTree((1,), (-1,), (math.nan,)), "BAD_TREE", "confidence of node 0"),
        (TokenTree((1,), (-1,), (), (Proposal.certain(VOCAB),)), "TOKEN_OUT_OF_VOCABULARY",
         "distribution of node 0"),
    ],
)  # fmt: skip
def test_a_malformed_tree_fails_its_check(tree: TokenTree, reason: str, message: str) -> None:
    with pytest.raises(TreeError, match=message) as caught:
        tree.check(VOCAB)
    assert caught.value.reason == reason


def test_distributions_travel_and_their_samples_are_checked() -> None:
    seed, position = 7, 100
    proposals = tuple(Proposal.checked([3, 9, 4], [0.5, 0.25, 0.25]) for _ in range(2))
    tokens = [each.draw(seed, position + node) for node, each in enumerate(proposals)]
    tree = TokenTree(tuple(tokens), (-1, 0), (), proposals)
    tree.check_samples(seed, position)
    received = TokenTree.from_proto(tree.to_proto())
    received.check(VOCAB)
    for sent, came in zip(proposals, received.proposals, strict=True):
        np.testing.assert_array_equal(came.tokens, sent.tokens)
        np.testing.assert_array_equal(came.probabilities, sent.probabilities)
    other = TokenTree((tokens[0], 9 if tokens[1] != 9 else 4), (-1, 0), (), proposals)
    with pytest.raises(TreeError, match="sample") as caught:
        other.check_samples(seed, position)
    assert caught.value.reason == "NOT_A_SAMPLE"
    with pytest.raises(TreeError, match="chain"):
        TokenTree((1, 2), (-1, -1)).check_samples(seed, position)
    TokenTree.chain([1, 2]).check_samples(seed, position)


def message(tokens: Any, parents: Any, *distributions: tuple[Any, Any]) -> tree_pb2.TokenTree:
    """A tree, and tokens and probabilities of some nodes' distributions."""
    made = tree_pb2.TokenTree(tokens=tokens, parents=parents)
    for drawn, probabilities in distributions:
        made.distributions.add(tokens=drawn, probabilities=probabilities)
    return made


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (message([1] * 9, range(-1, 8)), "TREE_TOO_LARGE"),
        (message([1, 2], [-1, 0], ([1], [1])), "BAD_TREE"),
        (message([1], [-1], ([1], [0.5])), "BAD_DISTRIBUTION"),
        (message([1], [-1], (range(4097), [1 / 4097] * 4097)), "BAD_DISTRIBUTION"),
    ],
)
def test_a_malformed_message_is_refused(message: tree_pb2.TokenTree, reason: str) -> None:
    with pytest.raises(TreeError, match=r"expected|send|add up") as caught:
        TokenTree.from_proto(message, max_nodes=8)
    assert caught.value.reason == reason


def test_trees_need_no_torch() -> None:
    assert "torch" not in packages_after("import paceline.tree")


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tree.path(node) for node in range(len(tree))}


def is_drafted(tree: TokenTree) -> bool:
    """Whether no two siblings are equal, as in trees of drafters."""
    return len(paths(tree)) == len(tree)


@given(
    trees(12, 4).filter(is_drafted), trees(12, 4).filter(is_drafted),
    st.integers(0, 24), st.integers(0, 12),
)  # fmt: skip
def test_a_merged_tree_has_the_likeliest_nodes_of_both(
    first: TokenTree, second: TokenTree, nodes: int, depth: int
) -> None:
    whole = merge(first, second, nodes=255, depth=255)
    merged = merge(first, second, nodes=nodes, depth=depth)
    for tree in (whole, merged):
        tree.check()
        assert is_drafted(tree)
    assert paths(whole) == paths(first) | paths(second)
    if len(first) and len(second):
        assert len(merged) <= nodes
        assert merged.depth <= depth
        assert paths(merged) <= paths(whole)
        for node in range(-1, len(whole)):
            chances = [whole.confidences[child] for child in whole.children(node)]
            assert sum(chances) <= 1 + 1e-6


@given(st.lists(trees(8), min_size=3, max_size=3))
def test_a_merged_node_is_of_the_first_source_that_proposed_it(parts: list[TokenTree]) -> None:
    """Also behind later changes of the tree; a drafter's tree names no source."""
    names = ("grammar", "ngram", "")
    sourced = [
        replace(part, sources=(name,) * len(part) if name else ())
        for part, name in zip(parts, names, strict=True)
    ]
    known_by = [paths(part) for part in parts]
    tree = merge(merge(sourced[0], sourced[1], nodes=99, depth=99), sourced[2], nodes=99, depth=99)
    for changed in (tree, tree.first(3), tree.best_chain()):
        for node in range(len(changed)):
            path = changed.path(node)
            known = [name for name, its in zip(names, known_by, strict=True) if path in its]
            found = changed.sources[node] if changed.sources else ""
            assert found == known[0]
