"""Which positions of a prefix a drafter gets to see under a KV budget."""

from __future__ import annotations

import torch
from torch import Tensor

SINKS = 4
"""First positions, kept whatever the budget: attention leans on them (Xiao et al., "Efficient
Streaming Language Models with Attention Sinks"), and training with anchor offsets (LongSpec,
section 3.2) leaves them in their places."""


def streaming(length: int, budget: int) -> tuple[range, ...]:
    """The first ``SINKS`` positions and the newest, or all.

    Args:
        length: Positions there are.
        budget: Most positions wanted; 0 for all. At ``SINKS`` or below only the newest are kept.

    Returns:
        One or two rising ranges, none of them empty; nothing if there is no position.
    """
    if length == 0:
        return ()
    if not 0 < budget < length:
        return (range(length),)
    if budget <= SINKS:
        return (range(length - budget, length),)
    return range(SINKS), range(length - budget + SINKS, length)


def best_chunks(scores: Tensor, size: int, count: int) -> Tensor:
    """Positions of the chunks with the highest scores.

    Args:
        scores: One a chunk, float ``[layers, chunks]``; chunk i holds positions ``i * size`` on.
        size: Positions a chunk.
        count: Chunks wanted, at most as many as there are.

    Returns:
        Rising positions of each layer, int64 ``[layers, count * size]``.
    """
    best = scores.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
    return (best.unsqueeze(-1) * size + torch.arange(size)).flatten(1)


class PageBounds:
    """Bounds on the keys of each page of positions (Tang et al., "Quest", section 3.2)."""

    def __init__(self, size: int) -> None:
        """Know no page yet; ``size`` positions make one."""
        self._size = size
        self._low: Tensor | None = None
        self._high: Tensor | None = None

    def extend(self, keys: Tensor, length: int) -> None:
        """Take in the whole pages among the first positions that are not known yet.

        Args:
            keys: ``[Hkv, capacity, D]``; positions taken in before have not changed.
            length: Positions that may be read.
        """
        known = 0 if self._low is None else self._low.shape[1]
        new = keys[:, known * self._size : length // self._size * self._size].float()
        if new.shape[1]:
            low, high = new.unflatten(1, (-1, self._size)).aminmax(dim=2)
            self._low = low if self._low is None else torch.cat([self._low, low], 1)
            self._high = high if self._high is None else torch.cat([self._high, high], 1)

    def scores(self, q: Tensor) -> Tensor:
        """Upper bounds on a page's scores, summed over queries: float32 ``[pages]``.

        Args:
            q: Queries ``[rows, Hq, D]``.
        """
        if self._low is None or self._high is None:
            return torch.empty(0)
        rows, _, dim = q.shape
        kv_heads = self._low.shape[0]
        heads = q.float().view(rows, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
        high = heads.clamp(min=0) @ self._high.mT
        return (high + heads.clamp(max=0) @ self._low.mT).sum((0, 1))
