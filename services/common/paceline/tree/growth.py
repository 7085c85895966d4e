"""How trees grow best first, and how two become one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import TypeVar

from paceline.tree.tree import TokenTree

State = TypeVar("State")
_NONE = -2  # state of a tree that a path has left


def grow(
    root: State,
    expand: Callable[[State, int], Iterable[tuple[int, float, State]]],
    *,
    nodes: int,
    depth: int,
    min_survival: float = 0.0,
    source: str = "",
) -> TokenTree:
    """Grow a tree best first: adds the node whose path is most likely to be accepted.

    ``root`` is the state of the anchor. ``expand`` returns the children of a node by its state and
    depth (0 for the anchor): token, confidence in [0, 1] and state of each, with no token twice.
    Nodes whose path is less likely than ``min_survival`` are left out. ``source`` proposes the
    nodes; empty: a drafter.

    Returns a tree with confidences whose nodes are sorted by falling survival: every prefix of it
    is the best tree of that size.
    """
    tokens, parents, confidences, _ = _grow(root, expand, nodes, depth, min_survival)
    sources = (source,) * len(tokens) if source else ()
    return TokenTree(tuple(tokens), tuple(parents), tuple(confidences), (), sources)


def _grow(
    root: State,
    expand: Callable[[State, int], Iterable[tuple[int, float, State]]],
    nodes: int,
    depth: int,
    min_survival: float = 0.0,
) -> tuple[list[int], list[int], list[float], list[State]]:
    """Return tokens, parents, confidences and states of the nodes of :func:`grow`."""
    tokens: list[int] = []
    parents: list[int] = []
    confidences: list[float] = []
    states: list[State] = []
    # The second entry breaks ties by age, so that states are never compared.
    heap: list[tuple[float, int, int, int, int, float, State]] = []
    pushed = 0

    def push_children(state: State, parent: int, level: int, survival: float) -> None:
        nonlocal pushed
        for token, confidence, child in expand(state, level):
            reach = survival * confidence
            if reach >= min_survival:
                heappush(heap, (-reach, pushed, token, parent, level + 1, confidence, child))
                pushed += 1

    if nodes > 0 and depth > 0:
        push_children(root, -1, 0, 1.0)
    while heap and len(tokens) < nodes:
        reach, _, token, parent, level, confidence, state = heappop(heap)
        tokens.append(token)
        parents.append(parent)
        confidences.append(confidence)
        states.append(state)
        if level < depth and len(tokens) < nodes:
            push_children(state, len(tokens) - 1, level, -reach)
    return tokens, parents, confidences, states


def accepted_tokens(tree: TokenTree, continuation: Sequence[int]) -> int:
    """Return the length of a tree's longest path that begins the text after the anchor."""
    matched = {-1: 0}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=False)):
        depth = matched.get(parent, len(continuation))
        if depth < len(continuation) and continuation[depth] == token:
            matched[node] = depth + 1
    return max(matched.values())


def merge(first: TokenTree, second: TokenTree, *, nodes: int, depth: int) -> TokenTree:
    """Return the nodes of two trees as one tree: at most so many, the likeliest, and none deeper.

    A node of both has the higher probability, and the source that it has in the first. Where
    siblings add up to more than 1, they are scaled.
    """
    if not len(first) or not len(second):
        return second if not len(first) else first
    trees = (first, second)
    children = [[tree.children(node) for node in range(-1, len(tree))] for tree in trees]

    def expand(state: tuple[int, int], level: int) -> Iterator[tuple[int, float, tuple[int, int]]]:
        merged: dict[int, tuple[float, tuple[int, int]]] = {}
        for place, (tree, node) in enumerate(zip(trees, state, strict=True)):
            for child in children[place][node + 1] if node >= -1 else ():
                token, chance = tree.tokens[child], tree.acceptance_probabilities[child]
                other = merged.get(token, (0.0, (_NONE, _NONE)))
                pair = (child, other[1][1]) if place == 0 else (other[1][0], child)
                merged[token] = (max(chance, other[0]), pair)
        total = max(1.0, sum(chance for chance, _ in merged.values()))
        for token, (chance, pair) in merged.items():
            yield token, chance / total, pair

    tokens, parents, confidences, states = _grow((-1, -1), expand, nodes, depth)
    of_first, of_second = first.sources, second.sources
    sources = [
        of_first[one] if one >= 0 and of_first else of_second[two] if one < 0 and of_second else ""
        for one, two in states
    ]
    return TokenTree(tuple(tokens), tuple(parents), tuple(confidences), (), tuple(sources))
