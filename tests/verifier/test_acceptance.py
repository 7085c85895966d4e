"""The walk and the tree, without any model."""

from __future__ import annotations

import random

import drafters
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.service import ServiceError
from paceline.v1 import tree_pb2
from paceline.verifier.engine.acceptance import Finish, walk
from paceline.verifier.engine.tree import DraftTree
from paceline.verifier.messages import Limits, read_tree

LIMITS = Limits(vocab_size=8, max_context=100, eos_token_ids=())


@st.composite
def trees(draw: st.DrawFn, tokens: int = 3) -> tuple[list[int], list[int]]:
    size = draw(st.integers(0, 25))
    names = draw(st.lists(st.integers(0, tokens - 1), min_size=size, max_size=size))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    return names, parents


def model(context: tuple[int, ...], key: int) -> int:
    """A token that depends on everything before it."""
    return random.Random(hash((context, key))).randrange(3)


def naive(
    tokens: list[int], parents: list[int], key: int, stop: set[int], limit: int
) -> tuple[list[int], list[tuple[int, ...]]]:
    """What is emitted, and every drafted path that holds as much of it as any does."""
    emitted: list[int] = []
    while True:
        emitted.append(model(tuple(emitted), key))
        path = tuple(emitted)
        if emitted[-1] in stop or len(emitted) == limit or path not in texts(tokens, parents):
            return emitted, list(texts(tokens, parents))


def texts(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """The text of every path from the anchor down."""
    out: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        out.append(((*out[parent], token)) if parent >= 0 else (token,))
    return set(out)


@given(trees(), st.integers(0, 1000), st.sets(st.integers(0, 2), max_size=1), st.integers(1, 9))
def test_walk_equals_naive(
    tree: tuple[list[int], list[int]], key: int, stop: set[int], limit: int
) -> None:
    tokens, parents = tree
    merged = DraftTree(tokens, parents).up_to_depth(limit - 1)
    node_text: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(merged)):
        node_text[node] = (*node_text[merged.parents[node]], merged.tokens[node - 1])
    assert len(set(node_text.values())) == len(node_text), "equal siblings were not merged"
    cut = {text for text in texts(tokens, parents) if len(text) < limit}
    assert set(node_text.values()) == cut | {()}

    walked = walk(merged, lambda node: model(node_text[node], key), stop, limit)
    expected, known = naive(tokens, parents, key, stop, limit)
    assert walked.tokens == expected
    held = max(n for n in range(len(expected) + 1) if n == 0 or tuple(expected[:n]) in known)
    assert len(walked.path) == min(held, limit - 1, len(expected))
    drafted = merged.drafted_path(walked.path)
    assert [tokens[node] for node in drafted] == expected[: len(drafted)]
    assert [parents[node] for node in drafted] == [-1, *drafted[:-1]][: len(drafted)]
    if walked.tokens[-1] in stop:
        assert walked.finish is Finish.STOP
    else:
        assert walked.finish is (Finish.LENGTH if len(expected) == limit else None)


def test_duplicates_do_not_hide_a_longer_path() -> None:
    """Of equal siblings the one without children comes first; the path goes on below the other."""
    tree = DraftTree([5, 5, 6], [-1, -1, 1])
    answers = {0: 5, 1: 6, 2: 7}
    walked = walk(tree, answers.__getitem__, (), 10)
    assert walked.tokens == [5, 6, 7]
    assert tree.drafted_path(walked.path) == [1, 2], "a path of the tree as it was drafted"
    assert len(tree) == 3


def test_chain_is_known_as_one() -> None:
    assert DraftTree([1, 2, 3], [-1, 0, 1]).is_chain
    assert DraftTree([1, 1, 2], [-1, -1, 1]).is_chain, "after merging"
    assert not DraftTree([1, 2], [-1, -1]).is_chain


@given(
    st.lists(st.integers(0, 9), max_size=12),
    st.lists(st.integers(-3, 13), max_size=12),
    st.lists(st.floats(width=32), max_size=12),
)
def test_read_tree_takes_exactly_the_good_ones(
    tokens: list[int], parents: list[int], confidences: list[float]
) -> None:
    good = (
        len(tokens) == len(parents)
        and len(confidences) in (0, len(tokens))
        and all(token < LIMITS.vocab_size for token in tokens)
        and all(-1 <= parent < node for node, parent in enumerate(parents))
        and all(0 <= confidence <= 1 for confidence in confidences)
    )
    message = tree_pb2.TokenTree(tokens=tokens, parents=parents, confidences=confidences)
    if good:
        assert len(read_tree(message, LIMITS)) == len(texts(tokens, parents)) + 1
    else:
        with pytest.raises(ServiceError, match=r"expected|send|tokens"):
            read_tree(message, LIMITS)


@given(trees())
def test_read_tree_takes_every_tree(tree: tuple[list[int], list[int]]) -> None:
    message = tree_pb2.TokenTree(tokens=tree[0], parents=tree[1])
    assert len(read_tree(message, LIMITS)) == len(texts(*tree)) + 1


def test_the_largest_tree() -> None:
    tokens, parents = drafters.every_token([], random.Random(0))
    assert len(DraftTree(tokens, parents)) <= 256
