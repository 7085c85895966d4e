"""Selection policies: which committed positions a drafter reads under a KV budget.

A policy is a :data:`PolicyFactory`, registered in :mod:`paceline.kv.policies`. The verifier makes
one :class:`SelectionPolicy` for each cache that a drafter follows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.kernels import best_chunks, streaming
from paceline.kv.scores import AttentionScores, ObservedCache, PageScores, ScoreObserver


class SelectionPolicy(ABC):
    """Chooses positions of the followed layers of one cache, again after each round.

    Runs on the verifier's event loop.

    Attributes:
        observer: Scores positions while the engine verifies; None if the policy needs no scores.
    """

    observer: ScoreObserver | None = None

    @abstractmethod
    def choose(self, committed: int, budget: int) -> list[Tensor]:
        """Choose positions.

        Args:
            committed: Committed length, at least 1. Unit: tokens.
            budget: Most positions per layer, at least 1.

        Returns:
            Positions for each layer, int64 ``[n]``, rising, all below ``committed``, the same
            number for all layers.
        """


PolicyFactory = Callable[[ObservedCache, Sequence[int]], SelectionPolicy]
"""Makes the policy of one cache, for some of its layers, counted from 0."""


def streaming_positions(length: int, budget: int) -> Tensor:
    """Returns the first of ``length`` positions and the newest, at most ``budget``; 0: all. int64,
    rising, ``[n]``."""
    parts = [torch.arange(part.start, part.stop) for part in streaming(length, budget)]
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


class Streaming(SelectionPolicy):
    """The first 4 positions and the newest, the same in every layer."""

    def __init__(self, cache: ObservedCache, layers: Sequence[int]) -> None:
        """See :data:`PolicyFactory`."""
        self._layers = len(layers)

    def choose(self, committed: int, budget: int) -> list[Tensor]:
        """See :class:`SelectionPolicy`."""
        return [streaming_positions(committed, budget)] * self._layers


class TopScores(SelectionPolicy):
    """The chunks with the highest scores of an observer, and all positions newer than these scores.

    Until there are scores, it chooses as :class:`Streaming`.
    """

    def __init__(self, cache: ObservedCache, observer: ScoreObserver) -> None:
        """Choose positions of a cache by the scores of ``observer``."""
        self.observer: ScoreObserver = observer
        self._streaming = Streaming(cache, tuple(observer.layers))

    def choose(self, committed: int, budget: int) -> list[Tensor]:
        """See :class:`SelectionPolicy`."""
        scores, size = self.observer.scores, self.observer.chunk
        if committed <= budget or scores is None:
            return self._streaming.choose(committed, budget)
        newer = torch.arange(scores.shape[1] * size, committed)
        count = min(scores.shape[1], (budget - len(newer)) // size)
        if count <= 0:
            return [torch.arange(committed - budget, committed)] * len(self.observer.layers)
        return [torch.cat([best, newer]) for best in best_chunks(scores, size, count)]


def verified(cache: ObservedCache, layers: Sequence[int]) -> SelectionPolicy:
    """Positions by the scores of two rows of the newest round (SpecAttn, equation 3)."""
    return TopScores(cache, AttentionScores(cache, layers))


def chunk_topk(cache: ObservedCache, layers: Sequence[int]) -> SelectionPolicy:
    """Chunks of 8 by attention weights summed over rounds (BudgetDraft, section 3.4)."""
    return TopScores(cache, AttentionScores(cache, layers, cumulative=True))


def quest(cache: ObservedCache, layers: Sequence[int]) -> SelectionPolicy:
    """Pages of 16 by upper bounds on the scores of two rows of the newest round (Quest)."""
    return TopScores(cache, PageScores(cache, layers))
