"""Collectors of several sequences, looking on while a batch runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.kernels import NotedBlock, Probe
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
        watch.collector.begin()
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

    def rooms(self, windows: Sequence[int | None]) -> tuple[tuple[int, ...], list[NotedBlock]]:
        """What a captured pass has to note for all of them: layers, and blocks with their rooms.

        Args:
            windows: Of each layer of the model.

        Returns:
            Nothing to note if they do not fit into one such pass: there all look at the same
            layers, without windows, and want scores alone.
        """
        wanted = {tuple(watch.collector.layers) for watch in self._watches}
        if len(wanted) != 1:
            return (), []
        (layers,) = wanted
        if any(windows[layer] is not None for layer in layers):
            return (), []
        blocks = []
        for watch in self._watches:
            room = watch.collector.room(watch.prefix)
            if room is None:
                return (), []
            blocks.append(NotedBlock(watch.block, watch.nodes, room))
        return layers, blocks

    def noted(self, q_heads: int) -> None:
        """A captured pass has noted into the rooms."""
        for watch in self._watches:
            watch.collector.noted(len(watch.nodes), q_heads, watch.prefix)

    def publish(self) -> None:
        """The pass is over."""
        for watch in self._watches:
            watch.collector.publish(watch.prefix)
