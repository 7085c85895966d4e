"""Trees around a text that is known: right nodes among wrong ones, of any shape and size."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from paceline.tree import EMPTY, MAX_NODES, TokenTree

SHAPES = {
    "nothing": 1, "chain": 3, "wrong": 1, "siblings": 4, "branches": 3, "wide": 1, "random": 3,
    "copies": 1,
}  # fmt: skip
"""Where nodes beside the right path are, and weights: beside its nodes, below each other, below the
anchor, anywhere, or beside its nodes and with their tokens."""

DEPTHS = {(1, 4): 2, (5, 16): 2, (17, 48): 4, (49, 130): 1, (MAX_NODES, MAX_NODES): 0.3}
EXTRAS = {(1, 1): 3, (2, 6): 3, (7, 40): 2, (41, MAX_NODES): 1}
ORDERS = ("path first", "others first", "mixed")


T = TypeVar("T")


def weighted(draws: Random, choices: dict[T, float]) -> T:
    """One of the keys, by their weights."""
    return draws.choices(list(choices), list(choices.values()))[0]


def draw_tree(
    draws: Random, right: Sequence[int], vocab_size: int, nodes: int, depth: int, shape: str = ""
) -> TokenTree:
    """A tree of at most so many nodes and levels.

    Args:
        draws: Draws it.
        right: Tokens that follow the anchor. A path has some of them, and may go wrong below.
        vocab_size: Number of tokens.
        nodes: Maximum number of nodes.
        depth: Maximum depth.
        shape: One of :data:`SHAPES`; empty: any.
    """
    shape = shape or weighted(draws, SHAPES)
    length = min(draws.randint(*weighted(draws, DEPTHS)), len(right), nodes, depth)
    if shape == "nothing" or length < 1:
        return EMPTY
    most = 0 if shape == "wrong" else draws.choice((length, 3, 20))
    correct = min(length, most if most == length else draws.randint(0, most))
    path = [*right[:correct], *(draws.randrange(vocab_size) for _ in range(length - correct))]
    if correct < length:
        path[correct] = (right[correct] + draws.randrange(1, vocab_size)) % vocab_size
    others = 0 if shape in ("chain", "wrong") else draws.randint(*weighted(draws, EXTRAS))
    if others and draws.random() < 0.4:  # whole tiles of rows, with the anchor's
        others += -(1 + length + others) % draws.choice((4, 8, 16))
    steps = [True] * length + [False] * min(others, nodes - length)
    order = draws.choice(ORDERS)
    if order == "mixed":
        draws.shuffle(steps)
    elif order == "others first":
        steps.reverse()
    tokens: list[int] = []
    parents: list[int] = []
    depths = {-1: 0}
    on_path = [-1]
    newest = -1
    for right_node in steps:
        level = len(on_path) - 1
        if right_node:
            token, parent = path[level], on_path[-1]
        else:
            above = draws.choice(on_path)
            if shape == "wide":
                above = -1
            elif shape == "random" or (shape == "branches" and draws.random() < 0.8):
                above = newest if shape == "branches" else draws.randrange(-1, len(tokens))
            parent = above if depths[above] < depth else -1
            copied = shape == "copies" and parent in on_path
            token = path[min(on_path.index(parent), length - 1)] if copied else -1
            token = token if token >= 0 else draws.randrange(vocab_size)
        newest = len(tokens)
        depths[newest] = depths[parent] + 1
        tokens.append(token)
        parents.append(parent)
        if right_node:
            on_path.append(newest)
    kind = draws.randrange(4)  # the verifier sorts nodes by what these say
    confidences = (
        (),
        tuple(draws.random() for _ in tokens),
        (1.0,) * len(tokens),
        tuple(0.9 if node in on_path else 0.99 for node in range(len(tokens))),
    )[kind]
    return TokenTree(tuple(tokens), tuple(parents), confidences)
