"""Growth on the host: level by level, each level of all trees by one forward pass."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from paceline.drafter.generation import Budget
from paceline.drafter.growth.beam import Chain
from paceline.drafter.growth.device import HostDraft, Passes, text_pass
from paceline.drafter.growth.text import Growth, PassPart, TextPasses
from paceline.kernels import TreePlan
from paceline.tree import TokenTree

Forward = Callable[[Tensor, TreePlan, Tensor], Tensor]
"""Maps tokens ``[M]``, their plan and the rows that need logits, int64 ``[R]``, to the logits."""


class LevelModel(Protocol):
    """A model whose trees grow level by level."""

    def grow_level(self, growing: Sequence[Any]) -> None:
        """Add one level to the tree of each generation, by one forward pass over all
        frontiers."""


class HostGrowth(Growth):
    """Growth level by level, which reads the candidates of each level on the host.

    A tree gets no further level that would probably end after its deadline. The estimate for a
    level is the duration of the one before.
    """

    at_once: ClassVar[bool] = False

    def __init__(self, model: LevelModel) -> None:
        # The model owns its growth: a reference back would keep an unloaded model in memory.
        self.model: LevelModel = weakref.proxy(model)

    def start(self, passes: TextPasses) -> bool:
        return True

    def begin(self, passes: TextPasses, limits: Budget, ahead: Chain | None) -> None:
        passes.text.begin_beam(limits, ahead)

    def grow(self, rounds: Sequence[tuple[TextPasses, Budget]]) -> list[TokenTree]:
        growing = [each for each in rounds if each[0].text.tree.grows]
        while growing:
            begun = time.monotonic()
            self.model.grow_level([passes for passes, _ in growing])
            now = time.monotonic()
            next_end = now + (now - begun)
            growing = [
                (passes, budget)
                for passes, budget in growing
                if passes.text.tree.grows and next_end < budget.deadline
            ]
        return [passes.text.tree.tree() for passes, _ in rounds]


def forward_parts(
    forward: Forward, parts: Sequence[PassPart], device: torch.device
) -> list[Tensor]:
    """Run one forward pass over the parts of several generations.

    Args:
        forward: The pass of the model.
        parts: One per generation; blocks refer to its caches by index.
        device: Device of the model.

    Returns:
        Logits ``[logit_rows, V]`` of each part.
    """
    passes = Passes(HostDraft([text_pass(parts)], []), device)
    plan = passes.plan(0)
    assert plan is not None
    logits = forward(passes.tokens(0), plan, passes.logit_rows(0))
    return list(logits.split([part.logit_rows for part in parts]))
