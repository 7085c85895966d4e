"""What a drill is, and what comes of one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.bench.drills.world import World

Figure = float | int | str


@dataclass
class Outcome:
    """What came of a drill."""

    checks: dict[str, bool] = field(default_factory=dict)
    """Everything that must hold, and whether it did."""

    figures: dict[str, Figure] = field(default_factory=dict)
    """What was measured on the way."""

    skipped: str = ""
    """Why it could not be run here; empty: it was."""

    @property
    def passed(self) -> bool:
        """Whether it was run and all held."""
        return not self.skipped and all(self.checks.values())


@dataclass(frozen=True)
class Drill:
    """One thing to break."""

    name: str
    what: str
    """What is done, for people."""

    run: Callable[[World], Awaitable[Outcome]]


@dataclass(frozen=True)
class Scale:
    """How large drills are."""

    generations: int
    """At a time."""

    tokens: int
    """New ones of each generation."""

    swaps: int
    hits: int
    """How often a process is killed, stopped or restarted."""

    clients: int
    """That are abandoned."""


FULL = Scale(generations=16, tokens=64, swaps=50, hits=3, clients=1000)
SHORT = Scale(generations=6, tokens=16, swaps=5, hits=1, clients=40)
