"""Tree builders."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafter.methods.base import grow

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
    survivals = list(tree.survivals)
    assert survivals == sorted(survivals, reverse=True)
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
