"""Best-first growth of a tree within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import TypeVar

from paceline.tree import TokenTree

State = TypeVar("State")


def grow(
    root: State,
    expand: Callable[[State, int], Iterable[tuple[int, float, State]]],
    *,
    nodes: int,
    depth: int,
    min_survival: float = 0.0,
) -> TokenTree:
    """Grows a tree best first: adds the node whose path is most likely to be accepted.

    Args:
        root: State of the anchor.
        expand: Returns the children of a node from its state and depth (0 for the anchor): token,
            confidence in [0, 1] and state of each, with no token twice.
        nodes: Most nodes of the tree.
        depth: Longest path.
        min_survival: Nodes whose path is less likely than this are left out.

    Returns:
        A tree with confidences whose nodes are sorted by falling survival: every prefix of it is
        the best tree of that size.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidences: list[float] = []
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
        if level < depth and len(tokens) < nodes:
            push_children(state, len(tokens) - 1, level, -reach)
    return TokenTree(tuple(tokens), tuple(parents), tuple(confidences))
