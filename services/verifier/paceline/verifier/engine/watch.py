"""Collectors of several sequences, looking on while a batch runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.kernels import Probe
from paceline.verifier.selection import Collector


@dataclass(frozen=True)
class Watch:
    """What one collector looks at in a batch.

    Attributes:
        collector: Whoever looks.
        block: Index of the sequence's block in the plan.
        nodes: Rows of the block, counted inside it, that the collector wants to look at.
        rows: Packed rows of the nodes.
        prefix: Committed positions. Unit: tokens.
    """

    collector: Collector
    block: int
    nodes: tuple[int, ...]
    rows: tuple[int, ...]
    prefix: int


class Watches:
    """An observer of a forward pass (:class:`paceline.decoder.AttentionObserver`)."""

    def __init__(self) -> None:
        self._watches: list[Watch] = []

    def __len__(self) -> int:
        """Number of watches."""
        return len(self._watches)

    def add(self, watch: Watch) -> None:
        """Look on for another collector."""
        self._watches.append(watch)

    def probes(self, layer: int) -> Sequence[Probe]:
        """See :class:`paceline.decoder.AttentionObserver`."""
        return [
            probe
            for watch in self._watches
            if layer in watch.collector.layers
            for probe in watch.collector.probes(watch.block, watch.nodes, watch.prefix)
        ]

    def attended(self, layer: int, q: Tensor) -> None:
        """See :class:`paceline.decoder.AttentionObserver`."""
        for watch in self._watches:
            if layer in watch.collector.layers:
                watch.collector.attended(layer, q, watch.rows, watch.prefix)

    def publish(self) -> None:
        """The pass is over."""
        for watch in self._watches:
            watch.collector.publish(watch.prefix)
