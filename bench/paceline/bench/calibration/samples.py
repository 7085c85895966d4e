"""What drafters were sure of, and what stood."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.drafter import Drafter
from paceline.drafter.acceptance import Recording, rounds
from paceline.drafter.tree import Tree

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Paths:
    """All drafted nodes of one depth: their confidences from the anchor's child down, `[n, depth]`,
    and whether the whole path stood, `[n]`."""

    confidences: Floats
    stood: NDArray[np.bool_]

    @property
    def survival(self) -> Floats:
        """Chance that a path stands, as its confidences have it, `[n]`."""
        product: Floats = self.confidences.prod(axis=1)
        return product


def collect(drafter: Drafter, recordings: Sequence[Recording]) -> list[Paths]:
    """Nodes of all rounds along recorded texts, by depth."""
    rows: list[list[list[float]]] = []
    stood: list[list[bool]] = []
    for recording in recordings:
        for tree, following in rounds(drafter, recording):
            for node, confidences in enumerate(_paths(tree)):
                depth = len(confidences)
                while len(rows) < depth:
                    rows.append([])
                    stood.append([])
                rows[depth - 1].append(confidences)
                stood[depth - 1].append(list(tree.path(node)) == following[:depth])
    return [Paths(np.array(r), np.array(s)) for r, s in zip(rows, stood, strict=True)]


def _paths(tree: Tree) -> list[list[float]]:
    """Confidences from the top down to each node."""
    paths: list[list[float]] = []
    for parent, confidence in zip(tree.parents, tree.confidences, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), confidence])
    return paths
