"""Which positions a follower is sent: policies, and what they learn while the engine verifies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels import (
    MOST_NOTED,
    SELECTION_CHUNK,
    PageBounds,
    Probe,
    TreeSegment,
    best_chunks,
    streaming,
)
from paceline.verifier.kv.base import SequenceKv

PAGE = 16
"""Positions of a page (Quest)."""

_ROOM = 4096
"""Rooms grow by this. Unit: positions."""


class Collector(ABC):
    """Scores the prefix of one sequence, layer by layer, as a by-product of its steps.

    The engine thread calls ``begin``, ``probes``, ``attended`` and, if the step does not fail,
    ``publish``; the event loop reads ``published``. It looks on from the first step after it was
    hung into ``Sequence.collectors``.

    Attributes:
        size: Positions a score stands for.
        published: A score for every whole chunk of ``size`` positions of the prefix that the newest
            step saw, float32 ``[layers, chunks]``; None before the first. It is overwritten in
            place by the step after next: who is that late gets a worse guess, nothing else.
    """

    size: int = 1

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = {layer: index for index, layer in enumerate(layers)}
        self.published: Tensor | None = None

    def nodes(self, block: TreeSegment) -> tuple[int, ...]:
        """Rows of a sequence's block to look at: the first, and the deepest if that is another."""
        deepest = block.depths.index(max(block.depths))
        return (0, deepest) if deepest else (0,)

    def begin(self) -> None:  # noqa: B027 - few keep anything for a step
        """A step begins."""

    @abstractmethod
    def probes(self, segment: int, nodes: Sequence[int], prefix: int) -> list[Probe]:
        """What is to be noted of the sequence's block in each of ``layers``.

        Args:
            segment: The block's index in the plan.
            nodes: Rows of it to look at, as :meth:`nodes` named them.
            prefix: Committed positions. Unit: tokens.
        """

    @abstractmethod
    def attended(self, layer: int, q: Tensor, rows: Sequence[int], prefix: int) -> None:
        """Those nodes have looked, in one of ``layers``.

        Args:
            layer: Which one.
            q: Queries of the whole batch, ``[M, Hq, D]``.
            rows: Rows of ``q`` that are the nodes'.
            prefix: As in ``probes``.
        """

    def room(self, prefix: int) -> Tensor | None:
        """Where a captured pass may note the scores of all of ``layers`` at once.

        Args:
            prefix: As in ``probes``.

        Returns:
            float32 ``[layers, MOST_NOTED, Hkv, n]``, and :meth:`noted` is called instead of
            ``attended``; None if it wants what such a pass does not note.
        """
        return None

    def noted(self, rows: int, q_heads: int, prefix: int) -> None:  # noqa: B027 - few have a room
        """The scores of so many nodes are in the room, sums over ``q_heads`` heads of each."""

    @abstractmethod
    def publish(self, prefix: int) -> None:
        """The step is over."""


class ScoreCollector(Collector):
    """Notes what attention computes: scores of the newest rows, or weights of all rows so far.

    Scores before the softmax, averaged over rows and heads, are SpecAttn's (equation 3): of the
    first row of a round and of its deepest, rejected or not. Weights that are added up over rounds,
    in chunks of 8, are BudgetDraft's.
    """

    def __init__(self, layers: Sequence[int], segment: SequenceKv, *, cumulative: bool) -> None:
        super().__init__(layers)
        self.size = SELECTION_CHUNK if cumulative else 1
        self._cumulative = cumulative
        rows, slots, device = len(layers), segment.capacity, segment.device
        self._notes = torch.empty(2, segment.layout.kv_heads, slots, device=device)
        self._step = torch.empty(rows, slots, device=device)
        self._total = torch.zeros(rows, slots, device=device)
        self._buffers = [torch.empty(rows, slots // self.size, device=device) for _ in range(2)]
        # Of a step, the same for all its layers:
        self._probes: list[Probe] | None = None
        self._noted = torch.empty(0)
        self._rows: list[Tensor] = []
        self._share = 1.0
        self._room = torch.empty(0)

    def begin(self) -> None:
        self._probes = None

    def probes(self, segment: int, nodes: Sequence[int], prefix: int) -> list[Probe]:
        if self._probes is None:
            if len(nodes) > len(self._notes):
                self._notes = self._notes.new_empty(len(nodes), *self._notes.shape[1:])
            self._probes = [
                Probe(segment, node, room, weights=self._cumulative)
                for node, room in zip(nodes, self._notes, strict=False)
            ]
            self._noted = self._notes[: len(nodes), :, :prefix]
            self._rows = list(self._step[:, :prefix])
        return self._probes

    def attended(self, layer: int, q: Tensor, rows: Sequence[int], prefix: int) -> None:
        torch.sum(self._noted, (0, 1), out=self._rows[self.layers[layer]])
        self._share = 1 / (len(rows) * q.shape[1])

    def room(self, prefix: int) -> Tensor | None:
        if self._cumulative:  # weights take a second look at the keys
            return None
        if not len(self._room) or self._room.shape[3] < prefix:
            slots = -(-max(prefix, 1) // _ROOM) * _ROOM
            shape = (len(self.layers), MOST_NOTED, self._notes.shape[1], slots)
            self._room = self._notes.new_empty(shape)
        return self._room

    def noted(self, rows: int, q_heads: int, prefix: int) -> None:
        torch.sum(self._room[:, :rows, :, :prefix], (1, 2), out=self._step[:, :prefix])
        self._share = 1 / (rows * q_heads)

    def publish(self, prefix: int) -> None:
        chunks = prefix // self.size
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        step = self._step[:, :prefix]
        if self._cumulative:
            total = self._total[:, :prefix].add_(step, alpha=self._share)
            whole = total[:, : chunks * self.size].unflatten(1, (chunks, self.size))
            self.published = torch.sum(whole, -1, out=buffer[:, :chunks]).cpu()
        else:
            self.published = torch.mul(step, self._share, out=buffer[:, :prefix]).cpu()


class PageCollector(Collector):
    """Bounds what the newest rows can score in each page, from bounds on the page's keys."""

    size = PAGE

    def __init__(self, layers: Sequence[int], segment: SequenceKv) -> None:
        super().__init__(layers)
        self._segment = segment
        self._bounds = PageBounds(PAGE)
        self._queries: list[Tensor] = [torch.empty(0) for _ in layers]

    def probes(self, segment: int, nodes: Sequence[int], prefix: int) -> list[Probe]:
        return []

    def attended(self, layer: int, q: Tensor, rows: Sequence[int], prefix: int) -> None:
        self._queries[self.layers[layer]] = q.index_select(0, torch.tensor(rows, device=q.device))

    def publish(self, prefix: int) -> None:
        self._bounds.extend([self._segment.layer(layer)[0] for layer in self.layers], prefix)
        self.published = self._bounds.scores(torch.stack(self._queries).cpu())


class Selection(ABC):
    """Chooses positions of each followed layer, after every round anew. Event loop.

    Attributes:
        collectors: What must be hung into the sequence for it.
    """

    collectors: tuple[Collector, ...] = ()

    @abstractmethod
    def choose(self, committed: int, budget: int) -> list[Tensor]:
        """Positions for each layer, rising, all below ``committed``, equally many everywhere.

        Args:
            committed: Positions there are, at least 1. Unit: tokens.
            budget: Most of a layer, at least 1. Unit: tokens.
        """


class Streaming(Selection):
    """The first and the newest positions, the same in every layer."""

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def choose(self, committed: int, budget: int) -> list[Tensor]:
        parts = [torch.arange(part.start, part.stop) for part in streaming(committed, budget)]
        return [torch.cat(parts)] * self._layers


class Scored(Selection):
    """The best chunks by a collector's newest scores, and everything that came after them.

    Until there are scores it is as :class:`Streaming`.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self.collectors = (collector,)
        self._first = Streaming(len(collector.layers))

    def choose(self, committed: int, budget: int) -> list[Tensor]:
        scores, size = self._collector.published, self._collector.size
        if committed <= budget or scores is None:
            return self._first.choose(committed, budget)
        newer = torch.arange(scores.shape[1] * size, committed)
        count = min(scores.shape[1], (budget - len(newer)) // size)
        if count <= 0:
            return [torch.arange(committed - budget, committed)] * len(self._collector.layers)
        return [torch.cat([best, newer]) for best in best_chunks(scores, size, count)]
