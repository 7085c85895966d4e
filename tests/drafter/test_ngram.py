"""Prompt lookup against a naive reference."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafter.methods.base import Budget, GenerationInfo, Resources, Update
from paceline.drafter.methods.ngram import NgramDrafter, NgramSequence
from paceline.sources.ngram import (
    Continuation,
    MatchStatistics,
    NgramIndex,
    NgramOptions,
    NgramOwners,
    SharedTexts,
    _chain,
)
from paceline.tree import grow

LARGE = Budget(nodes=64, depth=64)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def load(**options: str) -> NgramDrafter:
    return NgramDrafter.load(None, options, Resources())


def sequence(text: list[int], **options: str) -> NgramSequence:
    return load(**options).start(GenerationInfo(text, len(text), 1000))


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
    index = NgramIndex(text, min_n, min_n + more)
    index.add(len(text))
    # As many places as there are, so that no chain is cut short before a filtered one; then few.
    for limit in (len(text), places):
        found = index.matches(text, limit=limit, match_limit=10)
        assert found == naive_matches(text, min_n, min_n + more, limit, 10)
    for shortest in range(1, min_n + more + 1):
        found = index.matches(text, limit=len(text), match_limit=10, shortest=shortest)
        every = naive_matches(text, min_n, min_n + more, len(text), 10)
        assert found == [each for each in every if each[1] >= shortest]


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
    assert bool(tree) == bool(nodes and depth and naive_matches(text, 1, 5, 1, 32))


@given(texts, st.floats(0, 1))
def test_nodes_less_likely_than_asked_for_are_left_out(text: list[int], least: float) -> None:
    owners = NgramOwners(NgramOptions(min_survival=0.0, max_nodes=255))
    every = owners.start(text, "").propose(255, 8)  # all of 4 continuations
    tree = owners.start(text, "").propose(255, 8, min_survival=least)
    assert all(survival >= least for survival in tree.survivals)
    survivals = {every.path(n): survival for n, survival in enumerate(every.survivals)}
    paths = {tree.path(n) for n in range(len(tree))}
    assert paths <= survivals.keys()
    if least <= 0.2:  # matches of one token are looked up too, so that all shares are the same
        assert paths == {path for path, survival in survivals.items() if survival >= least}


def test_a_text_learns_from_matches_that_were_not_likely_enough() -> None:
    text = [1, 2, 3]
    source = NgramOwners(NgramOptions()).start(text, "")
    for _ in range(20):
        assert not len(source.propose(8, 8, min_survival=1.0))
        text += [4, 1, 2, 3]
        source.learn([4, 1, 2, 3])
    assert source.propose(8, 8, min_survival=0.9).tokens[:1] == (4,)


def continues_with(text: list[int], place: int, path: tuple[int, ...]) -> bool:
    """Whether the text from `place` on, repeated at its end, begins with the path."""
    return all(text[place + i % (len(text) - place)] == token for i, token in enumerate(path))


def test_statistics_of_a_text_outweigh_the_length_of_matches() -> None:
    """An n-gram of three repeats and is followed by a new token each time, or by the same one."""

    def first_survival(*, new: bool) -> float:
        drafted = sequence([1, 2, 3], min_survival="0.01")
        for i in range(12):
            drafted.extend(Update([100 + (i if new else 0), 200 + i, 1, 2, 3]))
            tree = drafted.draft(LARGE)
        return float(tree.survivals[0])

    assert first_survival(new=True) < 0.45
    assert first_survival(new=False) > 0.8


def test_survival_falls_as_documented() -> None:
    text = [1, 2, 3, *range(100, 200), 1, 2, 3]
    tree = sequence(text, min_survival="0.19").draft(LARGE)
    assert [tree.survivals[i] for i in range(len(tree))] == pytest.approx(
        [*accumulate([0.57, 0.66, *(n / (n + 2) for n in range(5, 7))], mul)]
    )


def test_a_periodic_text_continues_beyond_its_end() -> None:
    tree = sequence([1, 2, 3] * 4, continuations="1").draft(Budget(10, 10))
    assert tree.tokens == (1, 2, 3, 1, 2, 3, 1, 2, 3, 1)


def test_the_backlog_is_processed_in_slices() -> None:
    drafted = sequence([1, 2, 3] * 10)
    assert drafted.backlog == 30
    drafted.warm(10)
    assert drafted.backlog == 20
    assert drafted.draft(LARGE) == sequence([1, 2, 3] * 10).draft(LARGE)
    assert drafted.backlog == 0


def run(drafter: NgramDrafter, text: list[int], owner: str) -> None:
    """A generation from its start to its end."""
    drafter.start(GenerationInfo(text, 1, 1000, owner=owner)).close()


def first_tokens(drafter: NgramDrafter, text: list[int], owner: str) -> tuple[int, ...]:
    return drafter.start(GenerationInfo(text, len(text), 1000, owner=owner)).draft(LARGE).tokens[:3]


def test_the_owners_that_generated_last_are_kept() -> None:
    drafter = load(owners="2")
    run(drafter, [1, 2, 3, 4], "first")
    run(drafter, [1, 2, 3, 5], "second")
    run(drafter, [1, 2, 3, 6], "first")
    run(drafter, [1, 2, 3, 7], "third")
    assert first_tokens(drafter, [9, 1, 2, 3], "first") in ((6, 4), (6,), (4, 6))
    assert first_tokens(drafter, [9, 1, 2, 3], "second") == ()


def test_the_text_itself_comes_before_others_that_match_equally_long() -> None:
    drafter = load(continuations="1")
    run(drafter, [1, 2, 7, 7, 7], "me")
    assert first_tokens(drafter, [1, 2, 8, 8, 8, 1, 2], "me")[0] == 8


def naive_shared(
    texts: list[list[int]], text: list[int], n: int
) -> set[tuple[tuple[int, ...], int]]:
    """(all that follows in its text, length of the match) of each place that matches."""
    found = set()
    for other in texts:
        for place in range(n, len(other)):
            length = 0
            while length < min(place, len(text)) and other[place - 1 - length] == text[-1 - length]:
                length += 1
            if length >= n:
                found.add((tuple(other[place:]), length))
    return found


@given(st.lists(texts, max_size=6), texts)
def test_shared_matches_are_those_of_all_texts(others: list[list[int]], text: list[int]) -> None:
    shared = SharedTexts(1 << 10, (2, 4))
    for other in others:
        shared.add(other)
    found = shared.matches(text, limit=1000, match_limit=100)
    assert {(shared.continuation(p, 100), n) for p, n in found} == naive_shared(others, text, 2)


@given(st.lists(texts, min_size=1, max_size=20), texts)
def test_a_full_ring_holds_the_newest_tokens(others: list[list[int]], text: list[int]) -> None:
    """What it finds is there, and in the part of the ring that a text more does not overwrite."""
    shared = SharedTexts(32, (2,))
    for other in others:
        shared.add(other)
    kept: list[list[int]] = []
    room = 32
    for other in reversed(others):
        kept.append(other[max(0, len(other) + 1 - room) :] if room > 1 else [])
        room -= len(kept[-1]) + 1
    found = shared.matches(text, limit=100, match_limit=100)
    places = {(shared.continuation(p, 100), n) for p, n in found}
    assert places == naive_shared(kept, text, 2)


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 40), st.integers(0, 14))
def test_one_continuation_grows_as_many_do(tokens: list[int], match: int, depth: int) -> None:
    statistics = MatchStatistics(32, MatchStatistics(32))
    statistics.observe(match, [1, 2, 3], [1, 2, 4])
    only, least = Continuation(tuple(tokens), match, match**2, statistics), 0.3

    def expand(level: int, _: int) -> list[tuple[int, float, int]]:
        chance = statistics.confidence(match + level)
        return [(tokens[level], chance, level + 1)] if level < len(tokens) else []

    grown = grow(0, expand, nodes=depth, depth=depth, min_survival=least, source="ngram")
    assert _chain(only, depth, least) == grown
