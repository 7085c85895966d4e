"""Selection policies: which committed positions a drafter reads under a KV budget, by which scores.

A policy is a :data:`PolicyFactory`, registered in :mod:`paceline.kv.policies`. The verifier makes
one :class:`SelectionPolicy` for each cache that a drafter follows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from paceline.device import device_of
from paceline.kernels import (
    MAX_PROBES,
    SELECTION_CHUNK,
    PageBounds,
    Plane,
    Probe,
    QueryBlock,
    best_chunks,
    streaming,
)

PAGE = 16  # positions per page, as in Quest
_SCRATCH_STEP = 4096  # Scratch buffers grow in steps of this. Unit: positions.


class ObservedCache(Protocol):
    """One sequence's KV cache at the verifier."""

    capacity: int  # positions it has room for, in tokens
    device: torch.device  # where the KV is

    def layer(self, index: int) -> tuple[Plane, Plane]:
        """Return keys and values of a layer, each ``[Hkv, capacity, D]``."""


class ScoreObserver(ABC):
    """Scores the committed prefix of one sequence, layer by layer, as a by-product of its steps.

    In each step the engine thread calls :meth:`begin`, runs the model with the observer's probes,
    or a captured graph with its :meth:`scratch`, calls :meth:`attended` for each layer if queries
    are wanted, :meth:`publish` if the step did not fail, and :meth:`accepted` when the tokens are
    chosen. Then the event loop calls :meth:`best`.
    """

    chunk: int = 1  # positions per score
    wants_queries: bool = False  # whether :meth:`attended` is to be called
    weights: bool = False  # whether softmax weights are stored, not scores

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = {layer: index for index, layer in enumerate(layers)}
        """Position of each observed layer in :attr:`scores`, by layer."""
        self.scores: Tensor | None = None
        """One score for each whole chunk of the prefix that the newest step attended to, float32
        ``[layers, chunks]`` where the KV is; None before the first step. The step after next
        overwrites it in place: a reader that is this late only gets worse positions."""
        self._known: torch.Event | None = None

    def best(self, scores: Tensor, count: int) -> Tensor:
        """The ``count`` chunks of each layer with the highest of scores that were :attr:`scores`;
        of equal ones any. A GPU selects them beside the step that runs, and only their positions
        are copied. Returns their rising positions, int64 ``[layers, count * chunk]`` on the CPU."""
        if self._known is None:
            return best_chunks(scores, self.chunk, count).cpu()
        with device_of(scores.device).stream():
            self._known.wait()
            # A copy: what a step overwrites meanwhile would lead to places that do not exist.
            return best_chunks(scores.clone(), self.chunk, count).cpu()

    def _set_scores(self, scores: Tensor) -> None:
        """Replace :attr:`scores`, which a GPU may still compute."""
        self._known = device_of(scores.device).event()
        self.scores = scores

    def nodes(self, block: QueryBlock) -> tuple[int, ...]:
        """Return the rows of a block to observe: the first, and the deepest if it is another."""
        deepest = block.depths.index(max(block.depths))
        return (0, deepest) if deepest else (0,)

    @abstractmethod
    def begin(self, block: int, nodes: Sequence[int], prefix: int) -> None:
        """Begin a step that observes nodes, as :meth:`nodes` returned them, of this block of the
        plan, behind a prefix of so many committed positions."""

    def probes(self, layer: int) -> Sequence[Probe]:
        """Return the scores or weights that the attention kernel is to store in a layer."""
        return ()

    def attended(self, layer: int, q: Tensor) -> None:  # noqa: B027 - only if queries are wanted
        """Called after the pass with the queries of the observed nodes in one of the layers, after
        RoPE, float32 ``[nodes, Hq, D]``."""

    def scratch(self) -> Tensor | None:
        """Return where a captured CUDA graph can store the scores of all layers: float32
        ``[layers, nodes or more, Hkv, n]`` with n at least the prefix; None if the observer needs
        more than a captured graph stores."""
        return None

    @abstractmethod
    def publish(self, q_heads: int) -> None:
        """End the step of a model with this many query heads: replace :attr:`scores`."""

    def accepted(self, node: int) -> None:  # noqa: B027 - most observers use rejected rows too
        """Called after :meth:`publish` with the row of the last accepted token of the block."""


class Rows(Enum):
    """Rows of a round whose attention is scored."""

    ENDS = "ends"  # the first and the deepest, rejected or not (SpecAttn, equation 3)
    ALL = "all"  # all rows, rejected or not (SpecAttn, equation 2)
    LAST = "last"  # the row of the last accepted token (SpecExtend)


class AttentionScores(ScoreObserver):
    """Attention of rows of the newest round, or summed over all rounds so far.

    Averaged over rows and heads: scores before the softmax (SpecAttn, equations 2 and 3), or
    softmax weights (its appendix A). Weights summed over rounds, in chunks of 8, are
    BudgetDraft's (section 3.4).
    """

    def __init__(
        self,
        cache: ObservedCache,
        layers: Sequence[int],
        rows: Rows = Rows.ENDS,
        *,
        weights: bool = False,
        cumulative: bool = False,
    ) -> None:
        """Observe ``rows`` in ``layers`` of a cache; ``cumulative`` sums weights over rounds."""
        super().__init__(layers)
        self.chunk = SELECTION_CHUNK if cumulative else 1
        self.weights = weights or cumulative
        self._rows, self._cumulative = rows, cumulative
        count, slots, device = len(layers), cache.capacity, cache.device
        heads = cache.layer(layers[0])[0].shape[0]
        self._step = torch.empty(count, slots, device=device)
        self._total = torch.zeros(count, slots, device=device)
        self._buffers = [torch.empty(count, slots // self.chunk, device=device) for _ in range(2)]
        self._stored = torch.empty(count, MAX_PROBES, heads, 0, device=device)
        # Of the step that runs:
        self._block = self._prefix = self._q_heads = 0
        self._nodes: Sequence[int] = ()

    def nodes(self, block: QueryBlock) -> tuple[int, ...]:
        return super().nodes(block) if self._rows is Rows.ENDS else tuple(range(block.length))

    def begin(self, block: int, nodes: Sequence[int], prefix: int) -> None:
        self._block, self._nodes, self._prefix = block, nodes, prefix
        self._q_heads = 0
        layers, rows, heads, slots = self._stored.shape
        if slots < prefix or rows < len(nodes):
            slots = max(slots, -(-prefix // _SCRATCH_STEP) * _SCRATCH_STEP)
            self._stored = self._stored.new_empty(layers, max(rows, len(nodes)), heads, slots)

    def probes(self, layer: int) -> Sequence[Probe]:
        return [
            Probe(self._block, node, out, weights=self.weights)
            for node, out in zip(self._nodes, self._stored[self.layers[layer]], strict=False)
        ]

    def scratch(self) -> Tensor | None:
        return self._stored

    def publish(self, q_heads: int) -> None:
        self._q_heads = q_heads
        if self._rows is not Rows.LAST:
            self._score(slice(len(self._nodes)))

    def accepted(self, node: int) -> None:
        if self._rows is Rows.LAST and self._q_heads:  # not of a step that it did not observe
            self._score(slice(node, node + 1))

    def _score(self, rows: slice) -> None:
        """Replace :attr:`scores` by the mean over these of the observed rows."""
        prefix, chunks = self._prefix, self._prefix // self.chunk
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        step, share = self._step[:, :prefix], 1 / ((rows.stop - (rows.start or 0)) * self._q_heads)
        torch.sum(self._stored[:, rows, :, :prefix], (1, 2), out=step)
        if self._cumulative:
            total = self._total[:, :prefix].add_(step, alpha=share)
            whole = total[:, : chunks * self.chunk].unflatten(1, (chunks, self.chunk))
            self._set_scores(torch.sum(whole, -1, out=buffer[:, :chunks]))
        else:
            self._set_scores(torch.mul(step, share, out=buffer[:, :prefix]))


class PageScores(ScoreObserver):
    """Upper bounds on the scores of the newest rows in each page (Quest, section 3.2)."""

    chunk = PAGE
    wants_queries = True

    def __init__(self, cache: ObservedCache, layers: Sequence[int]) -> None:
        super().__init__(layers)
        self._cache = cache
        self._bounds = PageBounds(PAGE)
        self._queries: list[Tensor] = [torch.empty(0) for _ in layers]
        self._prefix = 0

    def begin(self, block: int, nodes: Sequence[int], prefix: int) -> None:
        self._prefix = prefix

    def attended(self, layer: int, q: Tensor) -> None:
        self._queries[self.layers[layer]] = q

    def publish(self, q_heads: int) -> None:
        self._bounds.extend([self._cache.layer(layer)[0] for layer in self.layers], self._prefix)
        self._set_scores(self._bounds.scores(torch.stack(self._queries)))


class SelectionPolicy(ABC):
    """Chooses positions of the followed layers of one cache, again after each round.

    Runs on the verifier's event loop.
    """

    observer: ScoreObserver | None = None
    """Scores positions while the engine verifies; None if the policy needs no scores."""

    @abstractmethod
    def choose(self, committed: int, budget: int) -> list[Tensor]:
        """At most ``budget`` positions per layer below ``committed``, both at least 1: int64
        ``[n]``, rising, the same number for all layers."""


PolicyFactory = Callable[[ObservedCache, Sequence[int]], SelectionPolicy]
"""Makes the policy of one cache, for some of its layers, counted from 0."""


def streaming_positions(length: int, budget: int) -> Tensor:
    """Return the first of ``length`` positions and the newest, at most ``budget``; 0: all. int64,
    rising, ``[n]``."""
    parts = [torch.arange(part.start, part.stop) for part in streaming(length, budget)]
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


class Streaming(SelectionPolicy):
    """The first 4 positions and the newest, the same in every layer."""

    def __init__(self, cache: ObservedCache, layers: Sequence[int]) -> None:
        self._layers = len(layers)

    def choose(self, committed: int, budget: int) -> list[Tensor]:
        return [streaming_positions(committed, budget)] * self._layers


class InWindows(SelectionPolicy):
    """The newest positions in layers with a sliding window, as many as another policy chooses in
    the others: a drafter that attends to them in order sees what the target sees."""

    def __init__(self, policy: SelectionPolicy, windowed: Sequence[bool]) -> None:
        """Choose for layers with a window or without one; ``policy`` knows only the latter."""
        self.observer = policy.observer
        self._policy, self._windowed = policy, windowed

    def choose(self, committed: int, budget: int) -> list[Tensor]:
        others = self._policy.choose(committed, budget)
        newest, rest = torch.arange(committed - len(others[0]), committed), iter(others)
        return [newest if windowed else next(rest) for windowed in self._windowed]


class TopScores(SelectionPolicy):
    """The chunks with the highest scores of an observer, and all positions newer than these scores.

    Until there are scores, it chooses as :class:`Streaming`.
    """

    def __init__(self, cache: ObservedCache, observer: ScoreObserver) -> None:
        """Choose positions of a cache by the scores of ``observer``."""
        self.observer: ScoreObserver = observer
        self._streaming = Streaming(cache, tuple(observer.layers))

    def choose(self, committed: int, budget: int) -> list[Tensor]:
        scores, size = self.observer.scores, self.observer.chunk
        if committed <= budget or scores is None:
            return self._streaming.choose(committed, budget)
        newer = torch.arange(scores.shape[1] * size, committed)
        count = min(scores.shape[1], (budget - len(newer)) // size)
        if count <= 0:
            return [torch.arange(committed - budget, committed)] * len(self.observer.layers)
        return [torch.cat([best, newer]) for best in self.observer.best(scores, count)]


def verified(
    cache: ObservedCache, layers: Sequence[int], rows: Rows = Rows.ENDS, *, weights: bool = False
) -> SelectionPolicy:
    """Return positions by the attention of rows of the newest round (SpecAttn, section 3.2)."""
    return TopScores(cache, AttentionScores(cache, layers, rows, weights=weights))


verified_weights = partial(verified, weights=True)
verified_all = partial(verified, rows=Rows.ALL)
verified_all_weights = partial(verified, rows=Rows.ALL, weights=True)
verified_last = partial(verified, rows=Rows.LAST)
verified_last_weights = partial(verified, rows=Rows.LAST, weights=True)


def chunk_topk(cache: ObservedCache, layers: Sequence[int]) -> SelectionPolicy:
    """Return the chunks of 8 by attention weights summed over rounds (BudgetDraft, section 3.4)."""
    return TopScores(cache, AttentionScores(cache, layers, cumulative=True))


def verified_pages(cache: ObservedCache, layers: Sequence[int]) -> SelectionPolicy:
    """Return pages of 16 by Quest's bounds on scores of two rows; Quest has them for each token."""
    return TopScores(cache, PageScores(cache, layers))
