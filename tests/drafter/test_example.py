"""The example of docs/extending.md."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    DraftSequence,
    GenerationInfo,
    LoadError,
    Resources,
    Update,
)

FILE = Path(__file__).parents[2] / "docs" / "examples" / "followers.py"
sys.path.insert(0, str(FILE.parent))
DRAFTER: type[Drafter] = importlib.import_module("followers").FollowersDrafter


def begin(text: list[int], **options: str) -> DraftSequence:
    drafter = DRAFTER.load(None, options, Resources())
    return drafter.start(GenerationInfo(text, len(text), 100))


def test_it_drafts_what_came_before() -> None:
    sequence = begin([1, 2, 3, 1, 2, 3, 1])
    assert sequence.draft(Budget(nodes=3, depth=3)).tokens == (2, 3, 1)
    sequence.extend(Update([4, 1, 4, 1]))
    tree = sequence.draft(Budget(nodes=2, depth=1))
    assert set(tree.tokens) == {2, 4}
    tree.check(vocab_size=100)


@given(
    text=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    nodes=st.integers(1, 20),
    depth=st.integers(1, 8),
)
@settings(max_examples=50)
def test_its_trees_are_valid_and_within_the_budget(text: list[int], nodes: int, depth: int) -> None:
    tree = begin(text).draft(Budget(nodes=nodes, depth=depth))
    assert len(tree) <= nodes
    assert tree.depth <= depth
    tree.check(vocab_size=100)


def test_wrong_settings_are_named() -> None:
    with pytest.raises(LoadError, match="branches"):
        begin([1], branches="0")
    with pytest.raises(LoadError, match="folder"):
        DRAFTER.load(Path("x"), {}, Resources())
