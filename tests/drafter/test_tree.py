"""Trees and their builders."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafter.builders import grow
from paceline.drafter.tree import EMPTY, Tree, chain

VOCAB = 50


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 40) -> Tree:
    nodes = draw(st.integers(0, max_nodes))
    tokens = tuple(draw(st.integers(0, VOCAB - 1)) for _ in range(nodes))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(nodes))
    confidences: tuple[float, ...] = ()
    if draw(st.booleans()):
        confidences = tuple(draw(st.floats(0, 1, width=32)) for _ in range(nodes))
    return Tree(tokens, parents, confidences)


@given(trees())
def test_a_tree_passes_its_check_and_survives_the_wire(tree: Tree) -> None:
    tree.check(VOCAB)
    assert Tree.from_proto(tree.to_proto()) == tree


@given(trees())
def test_depths_paths_and_children_agree(tree: Tree) -> None:
    for node in range(len(tree)):
        assert len(tree.path(node)) == tree.depths[node]
        assert tree.path(node)[-1] == tree.tokens[node]
        assert node in tree.children(tree.parents[node])
    assert sum(len(tree.children(node)) for node in range(-1, len(tree))) == len(tree)
    assert tree.depth == max((len(tree.path(node)) for node in range(len(tree))), default=0)


@given(trees())
def test_survival_is_the_product_along_the_path(tree: Tree) -> None:
    for node in range(len(tree)):
        above = tree.survival(tree.parents[node])
        own = tree.confidences[node] if tree.confidences else 1.0
        assert tree.survival(node) == pytest.approx(above * own)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (Tree((1, 2), (-1,)), "2 tokens but 1 parents"),
        (Tree((1,), (0,)), "topological"),
        (Tree((1, 2), (1, -1)), "topological"),
        (Tree((1,), (-2,)), "topological"),
        (Tree((VOCAB,), (-1,)), "tokens"),
        (Tree((-1,), (-1,)), "tokens"),
        (Tree((1,), (-1,), (0.5, 0.5)), "2 confidences"),
        (Tree((1,), (-1,), (1.5,)), "confidences"),
        (Tree((1,), (-1,), (math.nan,)), "confidences"),
    ],
)
def test_a_wrong_tree_fails_its_check(tree: Tree, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tree.check(VOCAB)


def test_a_chain_is_one_path() -> None:
    tree = chain([3, 4, 5], [0.5, 0.5, 0.25])
    tree.check()
    assert tree.path(2) == (3, 4, 5)
    assert tree.survival(2) == 0.0625
    assert chain([]) == EMPTY


# A rule of growth: depth to a list of children, the same for every node of that depth.
rules = st.lists(st.lists(st.floats(0.01, 1.0), max_size=3), min_size=1, max_size=4)


@given(rules, st.integers(0, 20), st.integers(0, 5), st.sampled_from([0.0, 0.1, 0.5]))
def test_grow_takes_the_likeliest_paths(
    rule: list[list[float]], nodes: int, depth: int, floor: float
) -> None:
    def expand(state: None, level: int) -> list[tuple[int, float, None]]:
        children = rule[level] if level < len(rule) else []
        return [(token, confidence, None) for token, confidence in enumerate(children)]

    tree = grow(None, expand, nodes=nodes, depth=depth, min_survival=floor)
    tree.check()
    survivals = [tree.survival(node) for node in range(len(tree))]
    assert survivals == pytest.approx(sorted(survivals, reverse=True))
    everything = sorted(survivals_of(rule[:depth], 1.0, floor), reverse=True)
    assert survivals == pytest.approx(everything[:nodes])
    assert len({tree.path(node) for node in range(len(tree))}) == len(tree)


def survivals_of(rule: Sequence[Sequence[float]], reach: float, floor: float) -> list[float]:
    """Survival of every node there could be."""
    if not rule:
        return []
    below: list[float] = []
    for confidence in rule[0]:
        if reach * confidence >= floor:
            below.append(reach * confidence)
            below += survivals_of(rule[1:], reach * confidence, floor)
    return below
