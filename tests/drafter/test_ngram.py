"""Prompt lookup against a naive reference."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafter.methods.base import Budget, Generation, Resources, Update
from paceline.drafter.methods.ngram.drafter import NgramDrafter, NgramSequence
from paceline.drafter.methods.ngram.index import NgramIndex
from paceline.tree import EMPTY

LARGE = Budget(nodes=64, depth=64)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def sequence(text: list[int], **options: str) -> NgramSequence:
    drafter = NgramDrafter.load(None, options, Resources())
    return drafter.start(Generation(text, len(text), 1000))


def naive_matches(
    text: list[int], min_n: int, max_n: int, places: int, limit: int
) -> list[tuple[int, int]]:
    """Quadratic: measures the match before every position, then sorts."""
    found: list[tuple[int, int, int]] = []
    for place in range(len(text) - 1, 0, -1):
        length = 0
        while length < place and text[place - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        if length >= min_n:
            found.append((min(length, max_n), place, min(length, limit)))
    found.sort(key=lambda each: (-each[0], -each[1]))
    return [(place, length) for _, place, length in found[:places]]


@given(texts, st.integers(1, 3), st.integers(0, 3), st.integers(1, 4))
def test_matches_are_the_most_recent_of_the_longest(
    text: list[int], min_n: int, more: int, places: int
) -> None:
    index = NgramIndex(min_n, min_n + more)
    index.append(text)
    # As many places as there are, so that no chain is cut short before a filtered one; then few.
    for limit in (len(text), places):
        found = index.matches(limit=limit, match_limit=10)
        assert found == naive_matches(text, min_n, min_n + more, limit, 10)


@given(texts, st.integers(0, 20), st.integers(0, 10))
def test_trees_are_valid_and_continue_as_the_text_did(
    text: list[int], nodes: int, depth: int
) -> None:
    tree = sequence(text, min_survival="0").draft(Budget(nodes, depth))
    tree.check(1000)
    assert len(tree) <= nodes
    assert tree.depth <= depth
    paths = {tree.path(node) for node in range(len(tree))}
    assert len(paths) == len(tree)
    for path in paths:
        assert any(continues_with(text, place, path) for place in range(1, len(text)))
    assert bool(tree) == bool(nodes and depth and naive_matches(text, 2, 5, 1, 32))


def continues_with(text: list[int], place: int, path: tuple[int, ...]) -> bool:
    """Whether the text from `place` on, repeated at its end, begins with the path."""
    return all(text[place + i % (len(text) - place)] == token for i, token in enumerate(path))


def test_statistics_of_a_text_outweigh_the_length_of_matches() -> None:
    """An n-gram of three repeats and is followed by a new token each time, or by the same one."""
    head = [1, 2, 3]
    never, always = (
        [t for i in range(12) for t in (*head, 100 + (i if new else 0), 200 + i)]
        for new in (True, False)
    )
    low, high = (
        sequence([*text, *head], min_survival="0.01").draft(LARGE).survivals[0]
        for text in (never, always)
    )
    assert low < 0.25
    assert high > 0.8


def test_survival_falls_as_documented() -> None:
    text = [1, 2, 3, *range(100, 200), 1, 2, 3]
    tree = sequence(text, min_survival="0.19").draft(LARGE)
    assert [tree.survivals[i] for i in range(len(tree))] == pytest.approx(
        [3 / (3 + i + 1) for i in range(12)]
    )


def test_continuations_that_differ_become_branches() -> None:
    tree = sequence([7, 8, 1, 7, 8, 2, 7, 8, 1, 9, 7, 8], min_survival="0").draft(Budget(8, 1))
    assert set(tree.tokens) == {1, 2}
    assert tree.tokens[0] == 1  # two of three places went on so
    assert sum(tree.confidences) <= 1


def test_a_periodic_text_continues_beyond_its_end() -> None:
    tree = sequence([1, 2, 3] * 4, continuations="1").draft(Budget(10, 10))
    assert tree.tokens == (1, 2, 3, 1, 2, 3, 1, 2, 3, 1)


def test_emitted_tokens_are_indexed_at_once() -> None:
    drafted = sequence([1, 2, 3, 4, 5])
    assert drafted.draft(LARGE) == EMPTY
    drafted.extend(Update([9, 1, 2]))
    assert drafted.draft(LARGE).tokens[:3] == (3, 4, 5)


def test_the_backlog_is_processed_in_slices() -> None:
    drafted = sequence([1, 2, 3] * 10)
    assert drafted.backlog == 30
    drafted.warm(10)
    assert drafted.backlog == 20
    assert drafted.draft(LARGE) == sequence([1, 2, 3] * 10).draft(LARGE)
    assert drafted.backlog == 0


def test_memory_grows_with_the_text_only() -> None:
    index = NgramIndex(2, 5)
    index.append([1] * 10_000)
    assert all(len(latest) == 1 for latest in index._latest)
    assert all(len(earlier) == 10_000 for earlier in index._earlier)
