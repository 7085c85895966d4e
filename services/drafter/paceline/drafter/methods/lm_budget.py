"""Which positions of its own KV ``lm`` looks at under a KV budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.decoder import KVCacheView
from paceline.kernels import SELECTION_CHUNK, Probe, attention_weights, best_chunks, streaming
from paceline.kernels.paged import span

OBSERVED = 64
"""Newest rows of a pass over text whose attention is noted. Unit: tokens."""


class Choice(Protocol):
    """A selection policy."""

    def choose(self, length: int, budget: int) -> Tensor:
        """Rising positions of the first ``length``, int64, at most ``budget`` of them."""
        ...


class Streaming:
    """The first positions and the newest."""

    def choose(self, length: int, budget: int) -> Tensor:
        """See :class:`Choice`."""
        return torch.cat([torch.arange(p.start, p.stop) for p in streaming(length, budget)])


class TopChunks:
    """The chunks of 8 that got the most attention so far, and all that is newer (BudgetDraft 3.4).

    A quarter of the budget at least is for the newest positions: what adds up over rounds says
    little of those that have seen few.
    Passes over the prompt see all of it; what their newest rows look at is what counts first.
    Rounds see chosen positions alone and add to what those got: a chunk that is never chosen stays
    at what the prompt gave it, as in the paper, and a round costs what the budget allows.
    """

    def __init__(self) -> None:
        self._total = torch.zeros(0)
        self._known = 0

    def add(self, positions: Tensor, weights: Tensor) -> None:
        """Positions, rising, got so much attention, float ``[n]``."""
        self._known = max(self._known, int(positions[-1]) + 1)
        if self._known > len(self._total):
            self._total = torch.cat([self._total, torch.zeros(2 * self._known - len(self._total))])
        self._total[positions] += weights

    def choose(self, length: int, budget: int) -> Tensor:
        """See :class:`Choice`."""
        chunks = min(self._known, length - budget // 4) // SELECTION_CHUNK
        newer = torch.arange(chunks * SELECTION_CHUNK, length)
        count = min(chunks, (budget - len(newer)) // SELECTION_CHUNK)
        if count <= 0 or length <= budget:
            return torch.arange(max(0, length - budget), length)
        whole = self._total[: chunks * SELECTION_CHUNK].unflatten(0, (chunks, SELECTION_CHUNK))
        best = best_chunks(whole.sum(-1)[None], SELECTION_CHUNK, count)[0]
        return torch.cat([best, newer])


POLICIES: dict[str, Callable[[], Choice]] = {"streaming": Streaming, "chunk_topk": TopChunks}
"""Policies by name."""


@dataclass(frozen=True)
class Look:
    """Rows of a pass whose attention is to be noted.

    Attributes:
        scores: Where to.
        rows: The last rows of one sequence in the packed pass.
        cache: What they attend to.
        positions: Of its first slots, up to the last row's.
    """

    scores: TopChunks
    rows: range
    cache: KVCacheView
    positions: Tensor


class Looks:
    """Notes what rows look at, summed over layers and heads; an ``AttentionObserver``."""

    def __init__(self, looks: Sequence[Look]) -> None:
        self._looks = looks

    def probes(self, layer: int) -> Sequence[Probe]:
        """None: few rows are looked at, and the newest tokens' own chunk counts as well."""
        return ()

    def attended(self, layer: int, q: Tensor) -> None:
        """See :class:`paceline.decoder.AttentionObserver`."""
        for look in self._looks:
            keys, _ = look.cache.layer(layer)
            rows = q[look.rows.start : look.rows.stop]
            weights = attention_weights(rows, span(keys, 0, len(look.positions)))
            look.scores.add(look.positions, weights.cpu())
