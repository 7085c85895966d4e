"""Drills and their outcomes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.bench.drills.world import World


@dataclass
class Outcome:
    """The outcome of a drill."""

    checks: dict[str, bool] = field(default_factory=dict)  # what must hold, and whether it did
    # What was measured on the way.
    figures: dict[str, float | int | str] = field(default_factory=dict)
    skipped: str = ""  # why the drill cannot run on this machine; empty if it ran

    @property
    def passed(self) -> bool:
        return not self.skipped and all(self.checks.values())


@dataclass(frozen=True)
class Drill:
    """One fault: its name, what is done, and the function that does it."""

    name: str
    what: str
    run: Callable[[World], Awaitable[Outcome]]


@dataclass(frozen=True)
class Scale:
    """Size of drills."""

    generations: int  # at a time
    tokens: int  # new tokens of each generation
    swaps: int  # versions of a drafter
    hits: int  # how often a process is killed, stopped or restarted
    clients: int  # how many are abandoned


FULL = Scale(generations=16, tokens=64, swaps=50, hits=3, clients=1000)
SHORT = Scale(generations=6, tokens=16, swaps=5, hits=1, clients=40)
