"""Selection of prefix positions for a drafter under a KV budget."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.caches import Plane, from_rows, head_width, span

# First positions, always selected: attention sinks (Xiao et al., "Efficient Streaming Language
# Models with Attention Sinks"), which training with anchor offsets (LongSpec, section 3.2) does not
# move.
SINKS = 4


# Positions that are selected together by their attention (BudgetDraft, section 3.4).
SELECTION_CHUNK = 8


def streaming(length: int, budget: int) -> tuple[range, ...]:
    """The first ``SINKS`` of ``length`` positions and the newest, at most ``budget``, or all if
    that is 0. With a budget of ``SINKS`` or below only the newest ones. Returns one or two rising,
    non-empty ranges; none if there is no position."""
    if length == 0:
        return ()
    if not 0 < budget < length:
        return (range(length),)
    if budget <= SINKS:
        return (range(length - budget, length),)
    return range(SINKS), range(length - budget + SINKS, length)


def best_chunks(scores: Tensor, size: int, count: int) -> Tensor:
    """Return the positions of the ``count`` chunks with the highest scores, float ``[layers,
    chunks]``; chunk i holds positions ``i * size`` on.

    Returns rising positions of each layer, int64 ``[layers, count * size]`` where the scores are.
    Of chunks with equal scores any are selected, on a GPU others than on a CPU.
    """
    best = scores.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
    return (best.unsqueeze(-1) * size + torch.arange(size, device=scores.device)).flatten(1)


def attention_weights(q: Tensor, keys: Tensor) -> Tensor:
    """Return attention weights that the newest positions give to all, summed over queries and
    heads: float32 ``[n]``. ``q`` are queries after RoPE of the last R positions, ``[R, Hq, D]``,
    ``keys`` keys after RoPE, ``[Hkv, n, D]``, the R positions last. Attention is causal."""
    rows, _, dim = q.shape
    kv_heads, length, _ = keys.shape
    heads = q.float().view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3)
    scores = heads @ keys.float().mT.unsqueeze(1) * dim**-0.5
    future = torch.ones(rows, length, dtype=torch.bool, device=q.device).triu(length - rows + 1)
    weights: Tensor = scores.masked_fill_(future, -torch.inf).softmax(-1)
    return weights.sum((0, 1, 2))


class PageBounds:
    """Bounds on the keys of each page of positions (Tang et al., "Quest", section 3.2).

    Several layers are processed at once, to save calls.
    """

    def __init__(self, size: int) -> None:
        """Make empty bounds for pages of ``size`` positions."""
        self._size = size
        self._known = 0
        # Least keys beside largest ones, [layers, Hkv, room, 2 D], where the keys are.
        self._bounds = torch.empty(0)

    def extend(self, keys: Sequence[Plane], length: int) -> None:
        """Add the new whole pages among the first ``length`` positions of each layer's keys,
        ``[Hkv, capacity, D]``; positions added before have not changed."""
        first, stop = self._known, length // self._size
        if first == stop:
            return
        heads, dim = keys[0].shape[0], head_width(keys[0])
        if not first or stop > self._bounds.shape[2]:
            device = span(keys[0], 0, 1).device
            grown = torch.zeros(len(keys), heads, 2 * stop, 2 * dim, device=device)
            if first:
                grown[:, :, :first] = self._bounds[:, :, :first]
            self._bounds = grown
        for bounds, layer in zip(self._bounds, keys, strict=True):
            pages = from_rows(span(layer, first * self._size, stop * self._size))
            pages = pages.unflatten(1, (-1, self._size))
            bounds[:, first:stop, :dim], bounds[:, first:stop, dim:] = pages.aminmax(dim=2)
        self._known = stop

    def scores(self, q: Tensor) -> Tensor:
        """Return upper bounds on a page's scores, summed over queries: float32 ``[layers, pages]``.
        ``q``: queries ``[layers, rows, Hq, D]``, where the keys are."""
        layers, rows, _, dim = q.shape
        if not self._known:
            return torch.empty(layers, 0, device=q.device)
        heads = self._bounds.shape[1]
        q = q.float().view(layers, rows, heads, -1, dim)
        # All queries are multiplied with the same bounds, so they can be summed first.
        sides = torch.cat([q.clamp(max=0).sum((1, 3)), q.clamp(min=0).sum((1, 3))], dim=2)
        bounds = self._bounds[:, :, : self._known].flatten(0, 1)
        scores = torch.bmm(bounds, sides.view(layers * heads, -1, 1))
        return scores.view(layers, heads, -1).sum(1)
