"""Growing the trees of several sequences together, level by level, as long as there is time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from paceline.drafter.methods.base import Budget
from paceline.drafter.methods.beam import Beam
from paceline.drafter.tree import EMPTY, Tree


class Growing(Protocol):
    """What a sequence must offer whose tree is a beam."""

    beam: Beam | None

    def begin(self, budget: Budget) -> bool:
        """Prepare a round; False where nothing is to be drafted."""
        ...

    @property
    def wants_level(self) -> bool:
        """Whether another level would be of use."""
        ...


S = TypeVar("S", bound=Growing)


def grow(
    rounds: Sequence[tuple[S, Budget]], grow_level: Callable[[Sequence[S]], None]
) -> list[Tree]:
    """One tree for each round; ``grow_level`` adds a level to each of the sequences it is given.

    A sequence gets no further level that would probably end after its deadline: a level is taken to
    last as long as the one before.
    """
    deadlines = {id(sequence): budget.deadline for sequence, budget in rounds}
    growing = [sequence for sequence, budget in rounds if sequence.begin(budget)]
    while growing:
        begun = time.monotonic()
        grow_level(growing)
        now = time.monotonic()
        next_end = now + (now - begun)
        growing = [
            sequence
            for sequence in growing
            if sequence.wants_level and next_end < deadlines[id(sequence)]
        ]
    return [s.beam.tree() if s.beam is not None else EMPTY for s, _ in rounds]
