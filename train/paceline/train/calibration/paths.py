"""Predicted and actual acceptance of drafted paths along recorded texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.drafter import Drafter
from paceline.drafter.acceptance import Recording, rounds
from paceline.tree import TokenTree

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Paths:
    """All drafted nodes of one depth.

    Attributes:
        confidences: Of the nodes on each path, from the anchor's child down, ``[n, depth]``.
        accepted: Whether the whole path was accepted, ``[n]``.
    """

    confidences: Floats
    accepted: NDArray[np.bool_]

    @property
    def survival(self) -> Floats:
        """Predicted probability that each path is accepted, ``[n]``."""
        product: Floats = self.confidences.prod(axis=1)
        return product

    @classmethod
    def joined(cls, parts: Sequence[Paths]) -> Paths:
        """The paths of several texts, all of one depth."""
        return cls(
            np.concatenate([part.confidences for part in parts]),
            np.concatenate([part.accepted for part in parts]),
        )


def collect(drafter: Drafter, recording: Recording) -> list[Paths]:
    """The paths of all rounds along a recorded text, by depth."""
    confidences: list[list[list[float]]] = []
    accepted: list[list[bool]] = []
    for tree, following in rounds(drafter, recording):
        for node, path in enumerate(_paths(tree)):
            depth = len(path)
            while len(confidences) < depth:
                confidences.append([])
                accepted.append([])
            confidences[depth - 1].append(path)
            accepted[depth - 1].append(list(tree.path(node)) == following[:depth])
    return [Paths(np.array(c), np.array(a)) for c, a in zip(confidences, accepted, strict=True)]


def _paths(tree: TokenTree) -> list[list[float]]:
    """Confidences from the anchor's child down to each node."""
    paths: list[list[float]] = []
    for parent, confidence in zip(tree.parents, tree.confidences, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), confidence])
    return paths
