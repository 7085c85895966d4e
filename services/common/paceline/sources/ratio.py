"""How often guesses were right, and how many are worth their time: what estimates learn from."""

from __future__ import annotations

_WEIGHT = 0.25  # of the newest tree in a number of nodes


class Ratio:
    """How often guesses of one kind were right. Older observations fade."""

    __slots__ = ("right", "tried")

    def __init__(self, right: float = 0.0, tried: float = 0.0) -> None:
        self.right, self.tried = right, tried

    def observe(self, *, right: bool, memory: float = 1.0) -> None:
        """Add an observation; ``memory`` is the weight of the older ones."""
        self.right = memory * self.right + right
        self.tried = memory * self.tried + 1.0

    def value(self, prior: float = 0.0, weight: float = 0.0) -> float:
        """Return the probability, with a prior that counts as ``weight`` observations."""
        return (self.right + weight * prior) / (self.tried + weight)


def worth_drafting(nodes: float, drafted: int, admitted: int, target: float) -> float:
    """Move the number of nodes of the next trees towards ``target``, by a tree of which so many
    nodes were admitted. It does not rise by a tree that was cut."""
    rises = target >= nodes and admitted != drafted
    return nodes if rises else nodes + _WEIGHT * (target - nodes)
