"""CPU backend of tree attention, invariant to the batch down to the last bit.

What makes it so (checked by tests/kernels, and at start by ``is_batch_invariant``):

- Chunk borders are absolute. A whole chunk is always multiplied as ``CHUNK`` keys whose place in the
  product is their position modulo ``CHUNK``, whether they come from the cache or, for a tree that
  crosses a border, are gathered along a path.
- In the chunk a row stands in, the other nodes of the tree lie between its keys. They get weight 0,
  and that product adds strictly one column after the other, so they change nothing.
- Chunks are merged by pairwise sums over their absolute index: absent chunks are zeros.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels._layout import ROW_MULTIPLE, BlockLayout, lay_out
from paceline.kernels.trees import CHUNK, MAX_TREE_NODES, TreePlan, TreeSegment

_SCRATCH_BYTES = 32 << 20
_MIN_COLUMNS = 16
_FLOOR = -1e30


class CpuBackend:
    """Chunked fp32 attention out of MKL and oneDNN matrix products; keeps scratch per thread."""

    name = "cpu"

    def __init__(self) -> None:
        self._scratch = threading.local()

    def attend(
        self,
        q: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        plan: TreePlan,
        *,
        scale: float,
        window: int | None,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """See :func:`paceline.kernels.tree_attention`."""
        for index, segment in enumerate(plan.segments):
            start, stop = plan.offsets[index], plan.offsets[index + 1]
            self._attend_block(
                q[start:stop],
                keys[segment.sequence],
                values[segment.sequence],
                segment,
                self._layout(plan, index, q.shape[1] // keys[segment.sequence].shape[0], window),
                scale,
                out[start:stop],
                None if lse is None else lse[start:stop],
            )

    def _layout(
        self, plan: TreePlan, index: int, group: int, window: int | None
    ) -> BlockLayout:
        key = ("cpu", index, group, window)
        layout: BlockLayout | None = plan.prepared.get(key)
        if layout is None:
            layout = plan.prepared[key] = lay_out(plan.segments[index], group, window)
        return layout

    def _attend_block(
        self,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        segment: TreeSegment,
        layout: BlockLayout,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        nodes, heads, dim = q.shape
        kv_heads = key.shape[0]
        group = heads // kv_heads
        packed = self._pack(q, kv_heads, layout)
        slots = layout.own_chunk - layout.first_chunk + (2 if layout.crossings else 1)

        # Column dim of `sums` is the softmax denominator.
        sums = torch.empty(kv_heads, slots, layout.padded, dim + 1)
        peaks = torch.empty(kv_heads, slots, layout.padded)
        own = slots - 2 if layout.crossings else slots - 1
        self._whole_chunks(packed, key, value, layout, scale, sums, peaks)
        own_sums, own_peaks = self._own_chunk(packed, key, value, segment, layout, scale)
        sums[:, own] = own_sums
        peaks[:, own] = own_peaks
        if layout.beyond is not None:
            _move_beyond(sums, peaks, own, layout.beyond)
            for crossing in layout.crossings:
                whole = _one_chunk(
                    packed[:, crossing.rows],
                    key[:, crossing.slots].float(),
                    value[:, crossing.slots].float(),
                    crossing.hidden,
                    scale,
                )
                sums[:, own, crossing.rows] = whole[0]
                peaks[:, own, crossing.rows] = whole[1]
        merged, peak = _merge(sums, peaks, layout.first_chunk)
        merged = merged[:, : layout.rows].view(kv_heads, nodes, group, dim + 1).transpose(0, 1)
        torch.div(
            merged[..., :dim], merged[..., dim:], out=out.view(nodes, kv_heads, group, dim)
        )
        if lse is not None:
            total = peak[:, : layout.rows].view(kv_heads, nodes, group).transpose(0, 1)
            torch.add(
                total, merged[..., dim].log(), out=lse.view(nodes, kv_heads, group)
            )

    def _pack(self, q: Tensor, kv_heads: int, layout: BlockLayout) -> Tensor:
        """fp32 ``[Hkv, padded, D]``: node after node, each with its whole GQA group."""
        nodes, heads, dim = q.shape
        packed = self._take("q", kv_heads * layout.padded * dim).view(kv_heads, layout.padded, dim)
        packed[:, : layout.rows].view(kv_heads, nodes, heads // kv_heads, dim).copy_(
            q.view(nodes, kv_heads, heads // kv_heads, dim).transpose(0, 1)
        )
        if layout.padded > layout.rows:
            packed[:, layout.rows :] = 0
        return packed

    def _whole_chunks(
        self,
        packed: Tensor,
        key: Tensor,
        value: Tensor,
        layout: BlockLayout,
        scale: float,
        sums: Tensor,
        peaks: Tensor,
    ) -> None:
        """Chunks before the one where the prefix ends, several at a time within the budget."""
        kv_heads, rows, dim = packed.shape
        bytes_per_chunk = 4 * kv_heads * CHUNK * (rows + 2 * dim)
        step = max(1, _SCRATCH_BYTES // bytes_per_chunk)
        for begin in range(layout.first_chunk, layout.own_chunk, step):
            end = min(begin + step, layout.own_chunk)
            count = end - begin
            at = slice(begin - layout.first_chunk, end - layout.first_chunk)
            k = self._fp32("k", key[:, begin * CHUNK : end * CHUNK]).unflatten(1, (count, CHUNK))
            v = self._fp32("v", value[:, begin * CHUNK : end * CHUNK]).unflatten(1, (count, CHUNK))
            scores = self._take("s", kv_heads * count * rows * CHUNK)
            scores = scores.view(kv_heads, count, rows, CHUNK)
            for head in range(kv_heads):
                _scores(packed[head].expand(count, rows, dim), k[head], scale, scores[head])
            hidden = None if layout.full_hidden is None else layout.full_hidden[at]
            torch.amax(_hide(scores, hidden), -1, out=peaks[:, at])
            _exponentiate(scores, peaks[:, at], hidden is not None)
            torch.sum(scores, -1, out=sums[:, at, :, dim])
            for head in range(kv_heads):
                torch.bmm(scores[head], v[head], out=sums[head, at, :, :dim])

    def _own_chunk(
        self,
        packed: Tensor,
        key: Tensor,
        value: Tensor,
        segment: TreeSegment,
        layout: BlockLayout,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Each row's own chunk: committed rest and tree nodes, other paths hidden."""
        kv_heads, rows, dim = packed.shape
        begin, count = layout.own_chunk * CHUNK, layout.columns
        k = self._fp32("k", key[:, begin : begin + count])
        if count < _MIN_COLUMNS:  # tiny products take another path, with other bits
            k = torch.nn.functional.pad(k, (0, 0, 0, _MIN_COLUMNS - count))
        scores = torch.empty(kv_heads, rows, k.shape[1])
        _scores(packed, k, scale, scores)
        scores = _hide(scores[..., :count].contiguous(), layout.own_hidden)
        peak = scores.amax(-1)
        _exponentiate(scores, peak, False)
        v = self._values_with_ones(kv_heads, dim)
        v[:, :count, :dim] = value[:, begin : begin + count]
        sums = torch.stack([_ordered_product(scores[h], v[h, :count]) for h in range(kv_heads)])
        return sums, peak

    def _values_with_ones(self, kv_heads: int, dim: int) -> Tensor:
        """fp32 ``[Hkv, CHUNK - 1 + MAX_TREE_NODES, D + 1]`` whose last column stays 1."""
        key = ("ones", kv_heads, dim)
        store = self._scratch.__dict__
        if key not in store:
            store[key] = torch.ones(kv_heads, CHUNK - 1 + MAX_TREE_NODES, dim + 1)
        found: Tensor = store[key]
        return found

    def _fp32(self, name: str, x: Tensor) -> Tensor:
        """``x`` itself if fp32, else an fp32 copy of it in scratch."""
        if x.dtype == torch.float32:
            return x
        return self._take(name, x.numel()).view(x.shape).copy_(x)

    def _take(self, name: str, numel: int) -> Tensor:
        """``numel`` floats of this thread's scratch; valid until the name is taken again."""
        store = self._scratch.__dict__
        flat: Tensor | None = store.get(name)
        if flat is None or flat.numel() < numel:
            flat = store[name] = torch.empty(numel)
        return flat[:numel]


def _one_chunk(
    packed: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """One whole chunk with keys of its own: the arithmetic of ``_whole_chunks``, gathered."""
    kv_heads, rows, dim = packed.shape
    padded = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    packed = torch.nn.functional.pad(packed, (0, 0, 0, padded - rows))
    scores = torch.empty(kv_heads, padded, CHUNK)
    _scores(packed, key, scale, scores)
    _hide(scores[:, :rows], hidden)
    peak = scores.amax(-1)
    _exponentiate(scores, peak, hidden is not None)
    sums = torch.empty(kv_heads, padded, dim + 1)
    torch.sum(scores, -1, out=sums[..., dim])
    torch.bmm(scores, value, out=sums[..., :dim])
    return sums[:, :rows], peak[:, :rows]


def _scores(q: Tensor, key: Tensor, scale: float, out: Tensor) -> None:
    torch.baddbmm(out, q, key.transpose(1, 2), beta=0, alpha=scale, out=out)


def _hide(scores: Tensor, hidden: Tensor | None) -> Tensor:
    return scores if hidden is None else scores.masked_fill_(hidden, float("-inf"))


def _exponentiate(scores: Tensor, peaks: Tensor, may_be_empty: bool) -> None:
    """``exp(scores - peaks)`` in place; rows that see nothing become 0."""
    if may_be_empty:
        peaks.clamp_(min=_FLOOR)
    scores.sub_(peaks.unsqueeze(-1)).exp_()


def _ordered_product(weights: Tensor, values: Tensor) -> Tensor:
    """``weights @ values``, added up strictly column after column (up to 512 of them)."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        weights, values.t(), None, "none", [], ""
    )
    return product


def _move_beyond(sums: Tensor, peaks: Tensor, own: int, beyond: Tensor) -> None:
    """Rows past the border have their own chunk one slot further; the others have none there."""
    sums[:, own + 1] = 0
    peaks[:, own + 1] = _FLOOR
    sums[:, own + 1, beyond] = sums[:, own, beyond]
    peaks[:, own + 1, beyond] = peaks[:, own, beyond]


def _merge(sums: Tensor, peaks: Tensor, first_chunk: int) -> tuple[Tensor, Tensor]:
    """Merge chunks by log-sum-exp: ``[Hkv, n, R, D + 1]`` to ``[Hkv, R, D + 1]``."""
    if sums.shape[1] == 1:
        return sums[:, 0], peaks[:, 0]
    peak = peaks.amax(1, keepdim=True)
    sums.mul_((peaks - peak).exp_().unsqueeze(-1))
    return _sum_chunks(sums, first_chunk), peak[:, 0]


def _sum_chunks(x: Tensor, first: int) -> Tensor:
    """Sum over dim 1 as a binary tree over the absolute chunk index ``first + i``; eats ``x``."""
    while x.shape[1] > 1:
        if first % 2:
            x = torch.cat([torch.zeros_like(x[:, :1]), x], 1)
            first -= 1
        pairs = x.shape[1] // 2
        x[:, 0 : 2 * pairs : 2] += x[:, 1::2]
        x = x[:, 0::2]
        first //= 2
    return x[:, 0]
