"""Committed KV of one cache, followed over gRPC."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from paceline.drafter.kv.following import Following
from paceline.drafter.kv.held import HeldKv


class FollowedKv(Following[HeldKv]):
    """K and V of at most a budget of positions of chosen layers: copies, kept in step."""

    transport: ClassVar[str] = "follow"
    byte_size: ClassVar[int] = 0
    """Of the verifier's memory that is mapped: nothing."""

    _kind = HeldKv

    def parts(self, index: int, below: int, budget: int) -> list[tuple[Tensor, Tensor]]:
        """See :meth:`paceline.drafter.methods.base.TargetKv.parts`: one part at most.

        Asked for the first layer, it takes in what came meanwhile (:meth:`take_in`).

        Raises:
            KvGone: What came makes no sense.
        """
        if index == self.layers[0]:
            self.take_in(below, budget)
        held = self._held
        if held is None or not len(held):
            return []
        return [held.layer(self.layers.index(index))]
