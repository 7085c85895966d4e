"""Drafting methods for drills: one sends malformed trees, one is slow."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from paceline.drafter import (
    Budget,
    Drafter,
    DraftSequence,
    Generation,
    Resources,
    TokenTree,
    Update,
)


class _Hostile(Drafter):
    @classmethod
    def load(cls, folder: Path | None, options: Mapping[str, str], resources: Resources) -> Drafter:
        return cls()


class _GarbageSequence(DraftSequence):
    def __init__(self) -> None:
        self._draws = random.Random(7)

    def extend(self, update: Update) -> None:
        """Ignores the update."""

    def draft(self, budget: Budget) -> TokenTree:
        draws, nodes = self._draws, self._draws.randrange(1, 300)
        return TokenTree(
            tuple(draws.randrange(1 << 32) for _ in range(nodes)),
            tuple(draws.randrange(-3, nodes) for _ in range(draws.choice((nodes, nodes - 1)))),
            tuple(draws.choice((0.5, -1.0, 2.0, float("nan"))) for _ in range(nodes)),
        )


class Garbage(_Hostile):
    """Trees with unknown tokens, cycles, lengths that differ, and NaN confidences."""

    method: ClassVar[str] = "garbage"

    def start(self, generation: Generation) -> DraftSequence:
        return _GarbageSequence()


class _SlowSequence(DraftSequence):
    def extend(self, update: Update) -> None:
        """Ignores the update."""

    def draft(self, budget: Budget) -> TokenTree:
        time.sleep(0.3)
        return TokenTree((1,), (-1,))


class Slow(_Hostile):
    """Blocks the drafting thread for 0.3 s a round."""

    method: ClassVar[str] = "slow"

    def start(self, generation: Generation) -> DraftSequence:
        return _SlowSequence()
