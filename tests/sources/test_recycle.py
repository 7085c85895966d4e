"""Token Recycling against a naive reference, and its bounds."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sources.recycle import RecycledTokens, RecycleOptions, RecycleOwners, RecycleSource
from paceline.tree import EMPTY, TokenTree

Candidates = tuple[list[int], list[float]]
tokens = st.integers(0, 3)
contexts = st.lists(tokens, min_size=1, max_size=3).map(tuple)


def start(text: Sequence[int], known: RecycledTokens | None = None) -> RecycleSource:
    options = RecycleOptions(min_survival=0.01)
    return RecycleSource(options, text, known or RecycledTokens(1000))


def certain(token: int) -> Candidates:
    return [token, token + 100], [0.9, 0.1]


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    return [tree.path(node) for node in range(len(tree))]


@given(st.lists(st.tuples(contexts, tokens), max_size=30), contexts)
def test_the_longest_context_and_the_newest_row_count(
    rows: list[tuple[tuple[int, ...], int]], asked: tuple[int, ...]
) -> None:
    known = RecycledTokens(1000)
    for context, token in rows:
        known.note(context, [token], [1.0])
    expected: tuple[int, list[int]] = (0, [])
    for length in range(1, len(asked) + 1):
        follow = [t for c, t in rows if len(c) >= length and c[-length:] == asked[-length:]]
        expected = (length, follow[-1:]) if follow else expected
    length, found, _ = known.find(asked)
    assert (length, list(found)) == expected


def test_no_more_contexts_are_kept_than_allowed_and_the_newest_stay() -> None:
    known = RecycledTokens(4)
    for token in range(10):
        known.note((token,), [token + 1], [1.0])
    assert [known.find((token,))[0] for token in range(10)] == [0] * 6 + [1] * 4


def test_a_path_is_proposed_that_the_model_found_likely() -> None:
    source = start([1, 2, 3])
    assert source.propose(16, 16) == EMPTY
    source.extend([4], EMPTY, [certain(4)])
    source.extend([5], EMPTY, [certain(5)])
    source.extend([1, 2, 3], TokenTree.chain([1, 2]), [certain(1), certain(2), certain(3)])
    tree = source.propose(16, 3)
    tree.check()
    assert (4, 5, 1) in paths(tree)
    assert tree.depth == 3
    assert len(source.propose(2, 16)) == 2


def test_rows_of_nodes_that_were_not_accepted_count_too() -> None:
    source = start([7])
    source.extend([1], TokenTree((2, 3), (-1, -1)), [certain(1), certain(8), certain(9)])
    source.extend([3], EMPTY, [certain(3)])
    assert source.propose(1, 1).tokens == (9,)


@pytest.mark.parametrize(("follows", "low", "high"), [(5, 0.85, 1.0), (6, 0.0, 0.15)])
def test_confidence_is_what_came_true(follows: int, low: float, high: float) -> None:
    """Of a candidate that the model finds likely, and that always comes or never."""
    source = start([0])
    for _ in range(60):
        behind = [0], [0.5]
        source.extend([follows, 0], TokenTree.chain([follows]), [certain(5), behind])
    tree = source.propose(16, 1)
    chances = dict(zip(tree.tokens, tree.confidences, strict=True))
    assert low <= chances.get(5, 0.0) <= high


@given(st.lists(st.tuples(tokens, st.lists(tokens, unique=True, min_size=1)), max_size=20), tokens)
def test_trees_are_valid(steps: list[tuple[int, list[int]]], first: int) -> None:
    source = start([first])
    for token, candidates in steps:
        source.extend([token], EMPTY, [(candidates, [1 / len(candidates)] * len(candidates))])
        tree = source.propose(16, 8)
        tree.check()
        assert len(set(paths(tree))) == len(tree) <= 16
        for node in range(-1, len(tree)):
            assert sum(tree.confidences[each] for each in tree.children(node)) <= 1 + 1e-9


def test_siblings_stand_in_the_order_of_the_noise() -> None:
    asked: list[int] = []

    def reverse(position: int, tokens: Sequence[int], chances: Sequence[float]) -> list[int]:
        asked.append(position)
        return [*reversed(range(len(tokens)))]

    source = RecycleSource(RecycleOptions(), [1, 2], RecycledTokens(9), reverse)
    source.extend([2], EMPTY, [([2, 5], [0.5, 0.5])])
    assert source.propose(1, 1).tokens == (5,)
    assert asked[-1] == 3, "the position of the token behind the anchor"


@pytest.mark.parametrize("owner", ["me", ""])
def test_what_is_known_stays_with_its_owner(owner: str) -> None:
    owners = RecycleOwners(RecycleOptions(owners=2))
    owners.start([1], owner, None).extend([2], EMPTY, [certain(2)])
    assert len(owners.start([1], owner, None).propose(4, 4)) == (2 if owner else 0)
    assert not len(owners.start([1], "another", None).propose(4, 4))
    owners.start([1], "a third", None)
    assert not len(owners.start([1], owner, None).propose(4, 4)), "of two owners, the newest"


@pytest.mark.parametrize(
    ("chances", "kept"),
    [
        ([0.6, 0.3, 0.1], 3),
        ([0.6, 0.4, 0.0], 2),  # a vocabulary with fewer tokens, or a mask
        ([1.0, 0.0, 0.0], 1),
        ([math.nan] * 3, 0),
        ([0.6, math.nan, math.nan], 1),
    ],
)
def test_candidates_without_a_probability_are_left_out(chances: list[float], kept: int) -> None:
    source = start([7])
    for _ in range(2):  # also what is learnt from them is a number
        source.extend([7], EMPTY, [([1, 2, 3], chances)])
    tree = source.propose(8, 1)
    tree.check()
    assert set(tree.tokens) == {1, 2, 3}.intersection(range(1, kept + 1))


def test_candidates_that_are_missing_are_an_error() -> None:
    """The verifier goes on without local sources then."""
    with pytest.raises(ValueError, match="argument"):
        start([7]).extend([1], TokenTree.chain([1]), [certain(1)])
