"""Scores of a text's positions by the attention of its newest rows, and chunks chosen by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels import SELECTION_CHUNK, KVCacheView, Probe, attention_weights, best_chunks
from paceline.kernels.caches import span


class TopChunks:
    """The chunks of 8 with the most cumulative attention, and all newer positions.

    See BudgetDraft, section 3.4. Passes over the prompt attend to all of it, and the scores of its
    newest rows are the first ones. Rounds attend to selected positions only and add to their
    scores: a chunk that is never selected keeps its score from the prompt.
    """

    def __init__(self) -> None:
        self._scores = torch.zeros(0)
        self._length = 0

    def add(self, positions: Tensor, weights: Tensor) -> None:
        """Add attention weights, float ``[n]``, to the scores of rising positions, ``[n]``."""
        self._length = max(self._length, int(positions[-1]) + 1)
        if self._length > len(self._scores):
            more = torch.zeros(2 * self._length - len(self._scores))
            self._scores = torch.cat([self._scores, more])
        self._scores[positions] += weights

    def select(self, length: int, budget: int, newest: int) -> Tensor:
        """Return at most ``budget`` of the first ``length`` positions: int64, rising.

        The ``newest`` ones are among them: scores say little of positions that few rows have
        attended to.
        """
        chunks = min(self._length, length - newest) // SELECTION_CHUNK
        newer = torch.arange(chunks * SELECTION_CHUNK, length)
        count = min(chunks, (budget - len(newer)) // SELECTION_CHUNK)
        if count <= 0 or length <= budget:
            return torch.arange(max(0, length - budget), length)
        scores = self._scores[: chunks * SELECTION_CHUNK].unflatten(0, (chunks, SELECTION_CHUNK))
        best = best_chunks(scores.sum(-1)[None], SELECTION_CHUNK, count)[0]
        return torch.cat([best, newer])


@dataclass(frozen=True)
class ObservedRows:
    """Rows of a pass whose attention is added to the scores."""

    scores: TopChunks  # receives the weights
    rows: range  # the last rows of one sequence in the packed pass
    cache: KVCacheView  # the cache that they attend to
    positions: Tensor  # positions of its first slots, up to the last row's, int64 ``[n]``


class TextScores:
    """Adds up attention weights over layers and heads; an ``AttentionObserver``."""

    def __init__(self, observed: Sequence[ObservedRows]) -> None:
        self._observed = observed

    def probes(self, layer: int) -> Sequence[Probe]:
        """Return none: the weights are computed here, of few rows and their own chunk too."""
        return ()

    def rows(self, layer: int) -> Sequence[int]:
        return [row for observed in self._observed for row in observed.rows]

    def attended(self, layer: int, q: Tensor) -> None:
        parts = q.split([len(observed.rows) for observed in self._observed])
        for observed, rows in zip(self._observed, parts, strict=True):
            keys, _ = observed.cache.layer(layer)
            weights = attention_weights(rows, span(keys, 0, len(observed.positions)))
            observed.scores.add(observed.positions, weights.cpu())
