"""The walk down a tree, the order of its nodes, and which of them are worth their time."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.tree import TokenTree
from paceline.verifier.engine.acceptance import walk
from paceline.verifier.engine.drafted import rank
from paceline.verifier.engine.report import FinishReason
from paceline.verifier.scheduler.scheduler import admit, min_survival


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 25) -> TokenTree:
    size = draw(st.integers(0, max_nodes))
    names = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
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


@dataclass
class Costs:
    """Step times by batch tokens, and the time lost before each step."""

    seconds: tuple[float, ...]

    def of(self, tokens: int, idle: float = 0.0) -> list[float]:
        return [idle + each for each in self.seconds[tokens - 1 :]]


several = st.lists(
    trees(4).map(lambda tree: rank(tree, max_depth=len(tree))[0]), min_size=1, max_size=3
)


def costs_for(steps: list[float]) -> Costs:
    """A rising curve out of any steps."""
    return Costs(tuple(accumulate(step + 1e-3 for step in steps)))


curves = st.lists(st.floats(0, 1), min_size=24, max_size=24).map(costs_for)


def admitted(
    survivals: Sequence[Sequence[float]], costs: Costs, idle: float = 0.0, *, causal: bool = False
) -> list[int]:
    """Nodes that are admitted in a step of one anchor a tree."""
    anchors = len(survivals)
    return admit(survivals, anchors, costs.of(anchors, idle), causal=causal)


@given(several, curves, st.booleans())
def test_what_is_admitted_is_a_tree(drafted: list[TokenTree], costs: Costs, causal: bool) -> None:
    got = admitted([tree.survivals for tree in drafted], costs, causal=causal)
    for tree, count in zip(drafted, got, strict=True):
        cut = tree.first(count)
        cut.check()
        assert len(cut) == count
        assert list(cut.survivals) == list(tree.survivals[:count])


@given(several, curves, st.floats(0, 2))
def test_no_choice_of_trees_does_better(
    drafted: list[TokenTree], costs: Costs, idle: float
) -> None:
    def rate(nodes: int, expected: float) -> float:
        return (len(drafted) + expected) / costs.of(len(drafted) + nodes, idle)[0]

    best = 0.0
    for choice in product(*(range(1 << len(tree)) for tree in drafted)):
        nodes, expected = 0, 0.0
        for tree, bits in zip(drafted, choice, strict=True):
            chosen = [node for node in range(len(tree)) if bits >> node & 1]
            if any(tree.parents[node] not in (-1, *chosen) for node in chosen):
                break
            nodes += len(chosen)
            expected += sum(tree.survivals[node] for node in chosen)
        else:
            best = max(best, rate(nodes, expected))
    survivals = [tree.survivals for tree in drafted]
    got = admitted(survivals, costs, idle)
    gained = sum(sum(s[:count]) for s, count in zip(survivals, got, strict=True))
    assert rate(sum(got), gained) == pytest.approx(best)


@given(several, curves, st.floats(0, 2))
def test_nodes_below_the_min_survival_are_never_admitted(
    drafted: list[TokenTree], costs: Costs, idle: float
) -> None:
    least = min_survival(len(drafted), costs.of(len(drafted), idle)[:13])  # 3 trees of 4 nodes
    likely = [[each for each in tree.survivals if each >= least] for tree in drafted]
    unlikely = [[each for each in tree.survivals if each < least] for tree in drafted]
    assert not any(admitted(unlikely, costs, idle))
    if not any(likely):
        assert not any(admitted([tree.survivals for tree in drafted], costs, idle))


def test_nodes_as_likely_as_the_min_survival_gain_what_they_cost() -> None:
    """A step for 4 sequences takes 10 ms, 12 with one node and 13 with two or three."""
    seconds = [0.010, 0.012, 0.013, 0.013, 0.020]
    assert min_survival(4, seconds) == pytest.approx(4 * 0.1)
    assert admit([[0.41] * 3, [], [], []], 4, seconds) == [3, 0, 0, 0]
    assert admit([[0.39] * 4, [], [], []], 4, seconds) == [0, 0, 0, 0]


@given(several, curves)
def test_it_admits_more_when_time_is_lost_anyway(drafted: list[TokenTree], costs: Costs) -> None:
    """Monotone: the more a step loses before it begins, the more nodes are worth their time."""
    survivals = [tree.survivals for tree in drafted]
    counts = [sum(admitted(survivals, costs, idle)) for idle in (0.0, 0.1, 1.0, 10.0, 1e6)]
    assert counts == sorted(counts)


@given(several, curves)
def test_early_stopping_admits_no_more_than_the_full_search(
    drafted: list[TokenTree], costs: Costs
) -> None:
    full, early = (
        admitted([tree.survivals for tree in drafted], costs, causal=causal)
        for causal in (False, True)
    )
    assert sum(early) <= sum(full)


@given(several, curves, st.data())
def test_early_stopping_looks_at_nothing_behind_its_cut(
    drafted: list[TokenTree], costs: Costs, data: st.DataObject
) -> None:
    """Nodes that were not admitted, but for the first of them, may be anything less likely."""
    survivals = [tree.survivals for tree in drafted]
    got = admitted(survivals, costs, causal=True)
    left = [v for s, n in zip(survivals, got, strict=True) for v in s[n:]]
    border = max(left, default=0.0)
    changed = []
    for s, n in zip(survivals, got, strict=True):
        scale = data.draw(st.floats(0, 1))
        changed.append([v if i < n or v == border else v * scale for i, v in enumerate(s)])
    assert admitted(changed, costs, causal=True) == got
