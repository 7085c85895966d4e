"""Attention-score observers of several sequences in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.kernels import Probe, ProbedBlock, TreeSegment
from paceline.kv.selection import ScoreObserver


@dataclass(frozen=True)
class _Observed:
    """The block of a batch that one observer observes.

    Attributes:
        observer: The sequence's observer.
        block: Index of the block in the plan.
        nodes: Observed rows, counted inside the block.
        rows: The same rows, counted in the batch.
    """

    observer: ScoreObserver
    block: int
    nodes: tuple[int, ...]
    rows: tuple[int, ...]


class BatchObserver:
    """All observers of a forward pass; a :class:`paceline.decoder.AttentionObserver`."""

    def __init__(self) -> None:
        self._observed: list[_Observed] = []

    def __len__(self) -> int:
        """Number of observers."""
        return len(self._observed)

    def add(self, observer: ScoreObserver, block: int, segment: TreeSegment, first: int) -> None:
        """Add the observer of one sequence.

        Args:
            observer: The observer; its step begins.
            block: Index of the sequence's block in the plan.
            segment: That block.
            first: Its first row in the batch.
        """
        nodes = observer.nodes(segment)
        observer.begin(block, nodes, segment.start)
        rows = tuple(first + node for node in nodes)
        self._observed.append(_Observed(observer, block, nodes, rows))

    def probes(self, layer: int) -> Sequence[Probe]:
        """See :class:`paceline.decoder.AttentionObserver`."""
        observers = [each.observer for each in self._observed if layer in each.observer.layers]
        return [probe for observer in observers for probe in observer.probes(layer)]

    def rows(self, layer: int) -> Sequence[int]:
        """See :class:`paceline.decoder.AttentionObserver`."""
        return [row for each in self._querying(layer) for row in each.rows]

    def attended(self, layer: int, q: Tensor) -> None:
        """See :class:`paceline.decoder.AttentionObserver`."""
        querying = self._querying(layer)
        parts = q.split([len(each.rows) for each in querying])
        for each, part in zip(querying, parts, strict=True):
            each.observer.attended(layer, part)

    def scratch(self, windows: Sequence[int | None]) -> tuple[tuple[int, ...], list[ProbedBlock]]:
        """Returns what a captured graph has to store: layers, and blocks with scratch buffers.

        Args:
            windows: Sliding window of each layer of the model, or None.

        Returns:
            Nothing if one captured graph cannot serve all observers: it stores scores, not weights,
            of the same layers for all, and of layers without a window.
        """
        observed = {tuple(each.observer.layers) for each in self._observed}
        if len(observed) != 1:
            return (), []
        (layers,) = observed
        if any(windows[layer] is not None for layer in layers):
            return (), []
        blocks = []
        for each in self._observed:
            scratch = each.observer.scratch()
            if scratch is None:
                return (), []
            blocks.append(ProbedBlock(each.block, each.nodes, scratch))
        return layers, blocks

    def publish(self, q_heads: int) -> None:
        """Called when the pass of a model with so many query heads has ended."""
        for each in self._observed:
            each.observer.publish(q_heads)

    def _querying(self, layer: int) -> list[_Observed]:
        return [
            each
            for each in self._observed
            if each.observer.wants_queries and layer in each.observer.layers
        ]
