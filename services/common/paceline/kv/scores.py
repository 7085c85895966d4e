"""Attention-score observers: they score committed positions while the target verifies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels import (
    MOST_NOTED,
    SELECTION_CHUNK,
    PageBounds,
    Plane,
    Probe,
    TreeSegment,
)

PAGE = 16
"""Positions per page (Quest)."""

_SCRATCH_STEP = 4096
"""Scratch buffers grow in steps of this. Unit: positions."""


class ObservedCache(Protocol):
    """One sequence's KV cache at the verifier.

    Attributes:
        capacity: Positions it has room for. Unit: tokens.
        device: Where the KV is.
    """

    capacity: int
    device: torch.device

    def layer(self, index: int) -> tuple[Plane, Plane]:
        """Returns keys and values of a layer, each ``[Hkv, capacity, D]``."""
        ...


class ScoreObserver(ABC):
    """Scores the committed prefix of one sequence, layer by layer, as a by-product of its steps.

    In each step the engine thread calls :meth:`begin`, then :meth:`attended` for each layer, or
    :meth:`read_scratch` once, and :meth:`publish` if the step did not fail. The event loop reads
    :attr:`scores`.

    Attributes:
        layers: Position of each observed layer in :attr:`scores`, by layer.
        chunk: Positions per score.
        scores: One score for each whole chunk of the prefix that the newest step attended to,
            float32 ``[layers, chunks]`` on the CPU; None before the first step. The step after next
            overwrites it in place: a reader that is this late only gets worse positions.
    """

    chunk: int = 1

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = {layer: index for index, layer in enumerate(layers)}
        self.scores: Tensor | None = None

    def nodes(self, block: TreeSegment) -> tuple[int, ...]:
        """Returns the rows of a block to observe: the first, and the deepest if it is another."""
        deepest = block.depths.index(max(block.depths))
        return (0, deepest) if deepest else (0,)

    @abstractmethod
    def begin(self, block: int, nodes: Sequence[int], prefix: int) -> Sequence[Probe]:
        """Begin a step.

        Args:
            block: Index of the sequence's block in the plan.
            nodes: Rows of the block that are observed, as :meth:`nodes` returned them.
            prefix: Committed positions. Unit: tokens.

        Returns:
            The scores or weights that the attention kernel is to store, in each of the layers.
        """

    @abstractmethod
    def attended(self, layer: int, q: Tensor, rows: Sequence[int]) -> None:
        """Called when the attention of one of the layers was computed.

        Args:
            layer: Which one.
            q: Queries of the whole batch after RoPE, ``[M, Hq, D]``.
            rows: Rows of ``q`` that belong to the observed nodes.
        """

    def scratch(self) -> Tensor | None:
        """Returns a buffer where a captured CUDA graph can store the scores of all layers.

        Returns:
            float32 ``[layers, MOST_NOTED, Hkv, n]`` with n at least the prefix, and
            :meth:`read_scratch` is called instead of :meth:`attended`; None if the observer needs
            more than a captured graph stores.
        """
        return None

    def read_scratch(self, q_heads: int) -> None:  # noqa: B027 - called only after scratch()
        """Called when a captured graph has stored scores, summed over ``q_heads`` heads."""

    @abstractmethod
    def publish(self) -> None:
        """End the step: replace :attr:`scores`."""


class AttentionScores(ScoreObserver):
    """Scores of the newest rows before the softmax, or weights summed over all rounds so far.

    Scores, averaged over rows and heads, are those of SpecAttn (equation 3), from the first row of
    a round and its deepest, rejected or not. Weights summed over rounds, in chunks of 8, are those
    of BudgetDraft (section 3.4).
    """

    def __init__(
        self, cache: ObservedCache, layers: Sequence[int], *, cumulative: bool = False
    ) -> None:
        """Observe ``layers`` of a cache; ``cumulative`` sums weights over rounds."""
        super().__init__(layers)
        self.chunk = SELECTION_CHUNK if cumulative else 1
        self._cumulative = cumulative
        rows, slots, device = len(layers), cache.capacity, cache.device
        heads = cache.layer(layers[0])[0].shape[0]
        self._stored = torch.empty(MOST_NOTED, heads, slots, device=device)
        self._step = torch.empty(rows, slots, device=device)
        self._total = torch.zeros(rows, slots, device=device)
        self._buffers = [torch.empty(rows, slots // self.chunk, device=device) for _ in range(2)]
        self._scratch = torch.empty(0)
        # Of the step that runs, the same for all its layers:
        self._nodes = self._prefix = 0
        self._stored_prefix = torch.empty(0)
        self._step_rows: list[Tensor] = []
        self._share = 1.0

    def begin(self, block: int, nodes: Sequence[int], prefix: int) -> Sequence[Probe]:
        """See :class:`ScoreObserver`."""
        if len(nodes) > len(self._stored):
            self._stored = self._stored.new_empty(len(nodes), *self._stored.shape[1:])
        self._nodes, self._prefix = len(nodes), prefix
        self._stored_prefix = self._stored[: len(nodes), :, :prefix]
        self._step_rows = list(self._step[:, :prefix])
        return [
            Probe(block, node, out, weights=self._cumulative)
            for node, out in zip(nodes, self._stored, strict=False)
        ]

    def attended(self, layer: int, q: Tensor, rows: Sequence[int]) -> None:
        """See :class:`ScoreObserver`."""
        torch.sum(self._stored_prefix, (0, 1), out=self._step_rows[self.layers[layer]])
        self._share = 1 / (len(rows) * q.shape[1])

    def scratch(self) -> Tensor | None:
        """See :class:`ScoreObserver`."""
        if self._cumulative:  # the kernels compute weights in a second pass over the keys
            return None
        if not len(self._scratch) or self._scratch.shape[3] < self._prefix:
            slots = -(-max(self._prefix, 1) // _SCRATCH_STEP) * _SCRATCH_STEP
            shape = (len(self.layers), MOST_NOTED, self._stored.shape[1], slots)
            self._scratch = self._stored.new_empty(shape)
        return self._scratch

    def read_scratch(self, q_heads: int) -> None:
        """See :class:`ScoreObserver`."""
        stored = self._scratch[:, : self._nodes, :, : self._prefix]
        torch.sum(stored, (1, 2), out=self._step[:, : self._prefix])
        self._share = 1 / (self._nodes * q_heads)

    def publish(self) -> None:
        """See :class:`ScoreObserver`."""
        prefix, chunks = self._prefix, self._prefix // self.chunk
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        step = self._step[:, :prefix]
        if self._cumulative:
            total = self._total[:, :prefix].add_(step, alpha=self._share)
            whole = total[:, : chunks * self.chunk].unflatten(1, (chunks, self.chunk))
            self.scores = torch.sum(whole, -1, out=buffer[:, :chunks]).cpu()
        else:
            self.scores = torch.mul(step, self._share, out=buffer[:, :prefix]).cpu()


class PageScores(ScoreObserver):
    """Upper bounds on the scores of the newest rows in each page (Quest, section 3.2)."""

    chunk = PAGE

    def __init__(self, cache: ObservedCache, layers: Sequence[int]) -> None:
        """Observe ``layers`` of a cache."""
        super().__init__(layers)
        self._cache = cache
        self._bounds = PageBounds(PAGE)
        self._queries: list[Tensor] = [torch.empty(0) for _ in layers]
        self._prefix = 0

    def begin(self, block: int, nodes: Sequence[int], prefix: int) -> Sequence[Probe]:
        """See :class:`ScoreObserver`."""
        self._prefix = prefix
        return ()

    def attended(self, layer: int, q: Tensor, rows: Sequence[int]) -> None:
        """See :class:`ScoreObserver`."""
        self._queries[self.layers[layer]] = q.index_select(0, torch.tensor(rows, device=q.device))

    def publish(self) -> None:
        """See :class:`ScoreObserver`."""
        self._bounds.extend([self._cache.layer(layer)[0] for layer in self.layers], self._prefix)
        self.scores = self._bounds.scores(torch.stack(self._queries).cpu())
