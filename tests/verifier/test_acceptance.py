"""The walk down a tree, and the order of its nodes."""

import random

from hypothesis import given
from hypothesis import strategies as st

from paceline.tree import TokenTree
from paceline.verifier.engine.acceptance import walk
from paceline.verifier.engine.drafted import FinishReason, rank


@st.composite
def trees(draw: st.DrawFn, tokens: int = 3) -> TokenTree:
    size = draw(st.integers(0, 25))
    names = draw(st.lists(st.integers(0, tokens - 1), min_size=size, max_size=size))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    confidences = draw(st.lists(st.floats(0, 1), min_size=size, max_size=size) | st.just([]))
    return TokenTree(tuple(names), tuple(parents), tuple(confidences))


def model(context: tuple[int, ...], key: int) -> int:
    """A token that depends on everything before it."""
    return random.Random(hash((context, key))).randrange(3)


def texts(tree: TokenTree) -> set[tuple[int, ...]]:
    """The text of every path from the anchor down that a walk can take."""
    out = {-1: ()}
    for node, parent in enumerate(tree.parents):
        if parent in out and tree.child(parent, tree.tokens[node]) == node:
            out[node] = tree.path(node)
    return set(out.values())


@given(trees(), st.integers(0, 1000), st.sets(st.integers(0, 2), max_size=1), st.integers(1, 9))
def test_walk_equals_plain_decoding(tree: TokenTree, key: int, stop: set[int], limit: int) -> None:
    output = walk(tree, lambda node: model(tree.path(node), key), stop, limit)
    expected: list[int] = []
    while tuple(expected) in texts(tree) and len(expected) < limit:
        expected.append(model(tuple(expected), key))
        if expected[-1] in stop:
            break
    assert output.tokens == expected
    assert [tree.tokens[node] for node in output.accepted] == expected[: len(output.accepted)]
    assert [tree.parents[node] for node in output.accepted] == [-1, *output.accepted][
        : len(output.accepted)
    ]
    if output.finish is None:
        assert len(output.accepted) == len(expected) - 1
    elif expected[-1] in stop:
        assert output.finish is FinishReason.STOP
    else:
        assert output.finish is FinishReason.LENGTH
        assert len(expected) == limit


@given(trees(), st.integers(0, 9))
def test_nodes_are_ranked_by_survival(tree: TokenTree, max_depth: int) -> None:
    ranked, nodes = rank(tree, max_depth)
    ranked.check()
    assert [ranked.path(node) for node in range(len(ranked))] == [tree.path(node) for node in nodes]
    deep = [node for node in range(len(tree)) if tree.depths[node] > max_depth]
    assert sorted([*nodes, *deep]) == list(range(len(tree)))
    assert list(ranked.survivals) == sorted(ranked.survivals, reverse=True)
    assert max(ranked.survivals, default=0) < 1, "calibration can lower every survival"
