"""Which drafted tokens stand: the walk down a tree."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

from paceline.verifier.engine.tree import DraftTree


class Finish(Enum):
    """Why a generation ended."""

    STOP = "stop"
    """An end-of-sequence or stop token was emitted."""
    LENGTH = "length"
    """As many tokens as wanted were emitted, or the context is full."""


@dataclass(frozen=True, slots=True)
class Walk:
    """What one round emits.

    Attributes:
        tokens: Emitted tokens, at least one.
        path: Nodes of the tree that hold the first of these tokens, from the anchor down. It has
            one node less than there are tokens, unless the last token ended the generation and
            was drafted too.
        finish: Set when the last token ended the generation.
    """

    tokens: list[int]
    path: list[int]
    finish: Finish | None


def walk(
    tree: DraftTree, choose: Callable[[int], int], stop_ids: Collection[int], limit: int
) -> Walk:
    """Walk down from the anchor as long as the tree holds the tokens the model chooses.

    Args:
        tree: The drafted tree.
        choose: Gives the token behind a node: the model's own, or under rejection sampling the
            drafted one or its replacement. It is called once for each node the walk
            stands on, from the anchor down, and each of its answers is emitted.
        stop_ids: Tokens that end the generation.
        limit: Most tokens to emit, at least 1.

    Returns:
        The emitted tokens. As far as ``choose`` does not look at the tree, they do not depend on it
        except for their number.
    """
    node = 0
    tokens: list[int] = []
    path: list[int] = []
    while True:
        token = choose(node)
        tokens.append(token)
        child = tree.children.get((node, token))
        if child is not None:
            path.append(child)
        if token in stop_ids:
            return Walk(tokens, path, Finish.STOP)
        if len(tokens) == limit:
            return Walk(tokens, path, Finish.LENGTH)
        if child is None:
            return Walk(tokens, path, None)
        node = child
