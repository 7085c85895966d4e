"""Mapped KV of one cache, read where the verifier's selection policy says."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from paceline.drafter.kv.device import DeviceKv
from paceline.drafter.kv.following import Following
from paceline.drafter.kv.held import HeldPositions
from paceline.drafter.kv.shared import SharedKv

MOST_NEWER = 128
"""Positions newer than the selection that are read beside it. With more of them, as after a loss of
the link, the selection is too old to be worth it. Unit: tokens."""


class ChosenPositions(Following[HeldPositions]):
    """Positions that the verifier chose, without their KV."""

    _kind = HeldPositions

    def newest(self, index: int, below: int, budget: int) -> tuple[Tensor, int] | None:
        """The newest selection for a layer that speaks of no position at or above ``below``.

        Asked for the first layer, it takes in what came meanwhile (:meth:`take_in`).

        Returns:
            Positions, int64 ``[n]`` in no order, and the committed length they were chosen from;
            None if there are none yet.

        Raises:
            KvGone: What came makes no sense.
        """
        if index == self.layers[0]:
            self.take_in(below, budget)
        held = self._held
        if held is None or not len(held) or self.committed > below:
            return None
        return held.positions(self.layers.index(index)), self.committed


class ChosenKv:
    """A mapping and positions to read in it; the contract is the mapping's (:class:`SharedKv`).

    The verifier sends positions alone, a few kilobytes a round; keys and values are read in its
    memory. A selection may be a round or more old, since it comes beside the rounds: positions
    committed after it are all read too. Without a selection, or with one that is far behind, the
    first and the newest positions are read.
    """

    transport: ClassVar[str] = "map"

    def __init__(self, mapped: SharedKv | DeviceKv, chosen: ChosenPositions) -> None:
        """Take over both; :meth:`close` closes both."""
        self._mapped = mapped
        self._chosen = chosen

    @property
    def byte_size(self) -> int:
        """Of the verifier's memory that is mapped. Unit: bytes."""
        return self._mapped.byte_size

    @property
    def received(self) -> int:
        """All that came over the wire so far: positions. Unit: bytes."""
        return self._chosen.received

    @property
    def positions(self) -> int:
        """Positions chosen of each layer."""
        return self._chosen.positions

    @property
    def updates(self) -> int:
        """Selections taken in so far."""
        return self._chosen.updates

    @property
    def committed(self) -> int:
        """See :attr:`SharedKv.committed`."""
        return self._mapped.committed

    def parts(self, index: int, below: int, budget: int) -> list[tuple[Tensor, Tensor]]:
        """See :meth:`paceline.drafter.methods.base.TargetKv.parts`: chosen ones are copied.

        Raises:
            KvGone: The mapping was closed, or what came makes no sense.
        """
        committed = min(self.committed, below)
        found = self._chosen.newest(index, committed, budget)
        if not 0 < budget < committed or found is None or committed - found[1] > MOST_NEWER:
            return self._mapped.parts(index, below, budget)
        positions, known = found
        parts = [self._mapped.at(index, positions)]
        if known < committed:
            parts.append(self._mapped.at(index, torch.arange(known, committed)))
        return parts

    def check(self) -> None:
        """See :meth:`SharedKv.check`. That positions come no more is no reason to end.

        Raises:
            KvGone: The cache is gone.
        """
        self._mapped.check()

    def close(self) -> None:
        """Let go of both. Closing twice is safe."""
        self._chosen.close()
        self._mapped.close()
