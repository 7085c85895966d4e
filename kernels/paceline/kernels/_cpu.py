"""CPU backend of tree attention, invariant to the batch down to the last bit.

What makes it so (checked by the tests, and at start by ``paceline.decoder.is_batch_invariant``):

- Chunk borders are absolute. A whole chunk is always multiplied as ``CHUNK`` keys whose place in
  the product is their position modulo ``CHUNK``, whether they come from the cache or, for a tree
  that crosses a border, are gathered along a path.
- In the chunk a row stands in, other nodes of the tree lie between its keys. They get weight 0,
  and that product adds strictly one column after the other, so they change nothing.
- Weights are relative to the maximum over all that a row sees, which no grouping changes. Chunks
  are added up eight by eight at absolute multiples of eight, absent ones being zeros; the row's own
  chunk comes last.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels._layout import BlockLayout, Crossing, lay_out
from paceline.kernels.trees import CHUNK, MAX_TREE_NODES, TreePlan

_KV_SCRATCH_BYTES = 32 << 20
_SCORE_BYTES = 64 << 20
_MIN_COLUMNS = 16  # products with fewer columns take another path, with other bits
_FEW_ROWS = 64  # up to here one product for all kv heads is faster than one for each
_RADIX = 8  # chunks added up at once

_linear = torch.ops.mkldnn._linear_pointwise.default


class CpuBackend:
    """Chunked fp32 attention out of MKL and oneDNN matrix products; keeps scratch per thread."""

    name = "cpu"

    def __init__(self) -> None:
        self._local = threading.local()

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
        heads = (q.shape[1], keys[0].shape[0])
        blocks = plan.prepared.get((heads, window))
        if blocks is None:
            blocks = plan.prepared[heads, window] = _blocks(plan, *heads, window)
        for sequence, begin, end, layout in blocks:
            part = None if lse is None else lse[begin:end]
            self._attend_block(
                q[begin:end], keys[sequence], values[sequence], layout, scale, out[begin:end], part
            )

    def _attend_block(
        self,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        layout: BlockLayout,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        nodes, heads, dim = q.shape
        kv_heads = key.shape[0]
        group = heads // kv_heads
        packed = self._pack(q, kv_heads, layout)
        scores = self._scores(packed, key, layout, scale)
        if layout.hidden is not None:
            scores[..., -layout.hidden.shape[1] :].masked_fill_(layout.hidden, float("-inf"))
        peaks = scores.amax(-1, keepdim=True)
        crossed = [_cross(packed, key, crossing, peaks, scale) for crossing in layout.crossings]
        scores.sub_(peaks).exp_()

        sums, mass = self._own_chunk(scores, value, layout)
        if layout.whole_chunks or crossed:
            before, before_mass = self._whole_chunks(scores, value, layout, crossed, peaks)
            sums, mass = before.add_(sums), before_mass.add_(mass)
        if layout.padded > layout.rows:
            sums, mass = sums[:, : layout.rows], mass[:, : layout.rows]

        if nodes == 1:
            torch.div(sums, mass.unsqueeze(-1), out=out.view(kv_heads, group, dim))
        else:
            by_node = sums.unflatten(1, (nodes, group)).transpose(0, 1)
            mass_by_node = mass.unflatten(1, (nodes, group)).transpose(0, 1).unsqueeze(-1)
            torch.div(by_node, mass_by_node, out=out.view(nodes, kv_heads, group, dim))
        if lse is not None:
            total = mass.log().add_(peaks[:, : layout.rows, 0]).unflatten(1, (nodes, group))
            lse.view(nodes, kv_heads, group).copy_(total.transpose(0, 1))

    def _pack(self, q: Tensor, kv_heads: int, layout: BlockLayout) -> Tensor:
        """fp32 ``[Hkv, padded, D]``: node after node, each with its whole GQA group.

        What the padding rows hold does not matter: no row depends on another.
        """
        nodes, heads, dim = q.shape
        group = heads // kv_heads
        packed = self._take("q", kv_heads * layout.padded * dim).view(kv_heads, layout.padded, dim)
        used = packed if layout.padded == layout.rows else packed[:, : layout.rows]
        if nodes == 1:
            used.copy_(q.view(kv_heads, group, dim))
        else:
            by_node = q.view(nodes, kv_heads, group, dim).transpose(0, 1)
            used.unflatten(1, (nodes, group)).copy_(by_node)
        return packed

    def _scores(self, packed: Tensor, key: Tensor, layout: BlockLayout, scale: float) -> Tensor:
        """Scaled scores of every slot looked at, ``[Hkv, padded, columns]``, in scratch."""
        kv_heads, rows, dim = packed.shape
        columns = layout.columns
        scores = self._take("s", kv_heads * rows * columns).view(kv_heads, rows, columns)
        if columns < _MIN_COLUMNS:
            few = key[:, layout.base : layout.stop].float()
            few = torch.nn.functional.pad(few, (0, 0, 0, _MIN_COLUMNS - columns))
            wide = scores.new_empty(kv_heads, rows, _MIN_COLUMNS)
            return scores.copy_(_multiply_keys(packed, few, scale, wide)[..., :columns])
        if key.dtype == torch.float32:
            return _multiply_keys(packed, key[:, layout.base : layout.stop], scale, scores)
        step = max(CHUNK, _KV_SCRATCH_BYTES // (4 * kv_heads * dim))
        step = columns if columns - step < _MIN_COLUMNS else step // CHUNK * CHUNK
        for begin in range(0, columns, step):
            end = min(begin + step, columns)
            if columns - end < _MIN_COLUMNS:
                end = columns
            k = self._fp32("kv", key[:, layout.base + begin : layout.base + end])
            part = scores if end - begin == columns else scores[..., begin:end]
            _multiply_keys(packed, k, scale, part)
            if end == columns:
                break
        return scores

    def _own_chunk(
        self, weights: Tensor, value: Tensor, layout: BlockLayout
    ) -> tuple[Tensor, Tensor]:
        """Weighted values of each row's own chunk, ``[Hkv, R, D]``, and total weights ``[Hkv, R]``.

        A last column of ones in the values makes the same product sum the weights.
        """
        kv_heads, rows, _ = weights.shape
        dim = value.shape[2]
        begin = layout.own_chunk * CHUNK
        count = layout.stop - begin
        mine = weights[..., -count:]
        if kv_heads * rows <= _FEW_ROWS:
            v = self._ones("all", CHUNK - 1 + MAX_TREE_NODES, kv_heads, dim + 1)[:count]
            v[..., :dim] = value[:, begin : layout.stop].transpose(0, 1)
            product = _ordered_product(mine.reshape(-1, count), v.flatten(1))
            both = product.view(kv_heads, rows, kv_heads, dim + 1).diagonal(0, 0, 2)
            both = both.permute(2, 0, 1)
        else:
            v = self._ones("each", kv_heads, CHUNK - 1 + MAX_TREE_NODES, dim + 1)[:, :count]
            v[..., :dim] = value[:, begin : layout.stop]
            both = torch.stack([_ordered_product(mine[h], v[h]) for h in range(kv_heads)])
        return both[..., :dim], both[..., dim]

    def _whole_chunks(
        self,
        weights: Tensor,
        value: Tensor,
        layout: BlockLayout,
        crossed: list[tuple[Crossing, Tensor]],
        peaks: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Weighted values and total weights of all whole chunks, as ``_own_chunk``."""
        kv_heads, rows, _ = weights.shape
        dim = value.shape[2]
        count = layout.whole_chunks
        skip = layout.first_chunk % _RADIX
        last = skip + count
        slots = _round_up(last + bool(crossed), _RADIX)
        sums = torch.empty(kv_heads, slots, rows, dim)
        mass = torch.empty(kv_heads, slots, rows)
        for empty in (slice(0, skip), slice(last, slots)):
            if empty.stop > empty.start:
                sums[:, empty] = 0
                mass[:, empty] = 0
        if count:
            by_chunk = weights[..., : count * CHUNK].unflatten(2, (count, CHUNK)).transpose(1, 2)
            torch.sum(by_chunk, -1, out=mass[:, skip:last])
            step = max(1, _KV_SCRATCH_BYTES // (4 * kv_heads * CHUNK * dim))
            for begin in range(0, count, step):
                end = min(begin + step, count)
                at = layout.base + begin * CHUNK
                v = self._fp32("kv", value[:, at : at + (end - begin) * CHUNK])
                v = v.unflatten(1, (end - begin, CHUNK))
                for head in range(kv_heads):
                    into = sums[head, skip + begin : skip + end]
                    torch.bmm(by_chunk[head, begin:end], v[head], out=into)
        for crossing, scores in crossed:
            part = scores.sub_(peaks[:, crossing.rows]).exp_()
            v = value[:, crossing.slots].float()
            sums[:, last, crossing.rows] = torch.bmm(part, v)
            mass[:, last, crossing.rows] = part.sum(-1)
        group = layout.first_chunk // _RADIX
        return _sum_slots(sums, group), _sum_slots(mass, group)

    def _fp32(self, name: str, x: Tensor) -> Tensor:
        """``x`` itself if fp32, else an fp32 copy of it in scratch."""
        if x.dtype == torch.float32:
            return x
        return self._take(name, x.numel()).view(x.shape).copy_(x)

    def _take(self, name: str, numel: int) -> Tensor:
        """``numel`` floats of this thread's scratch; valid until the name is taken again."""
        store = self._local.__dict__
        flat: Tensor | None = store.get(name)
        if flat is None or flat.numel() < numel:
            flat = store[name] = torch.zeros(numel)
        return flat[:numel]

    def _ones(self, name: str, *shape: int) -> Tensor:
        """Scratch of one shape, 1 where nothing was ever written."""
        store = self._local.__dict__
        key = f"{name}{shape}"
        found: Tensor | None = store.get(key)
        if found is None:
            found = store[key] = torch.ones(shape)
        return found


def _blocks(
    plan: TreePlan, heads: int, kv_heads: int, window: int | None
) -> list[tuple[int, int, int, BlockLayout]]:
    """Cut segments so that the scores of a block stay small: sequence, row range, layout."""
    group = heads // kv_heads
    blocks: list[tuple[int, int, int, BlockLayout]] = []
    for segment, row in zip(plan.segments, plan.offsets, strict=False):
        most = max(1, _SCORE_BYTES // (4 * heads * segment.stop))
        for first in range(0, segment.length, most):
            nodes = min(most, segment.length - first)
            layout = lay_out(segment, group, window, first, nodes)
            blocks.append((segment.sequence, row + first, row + first + nodes, layout))
    return blocks


def _cross(
    packed: Tensor, key: Tensor, crossing: Crossing, peaks: Tensor, scale: float
) -> tuple[Crossing, Tensor]:
    """Scores of a gathered chunk, ``[Hkv, n, CHUNK]``; raises the rows' peaks where needed."""
    q = packed[:, crossing.rows]
    scores = torch.empty(q.shape[0], q.shape[1], CHUNK)
    _multiply_keys(q, key[:, crossing.slots].float(), scale, scores)
    if crossing.hidden is not None:
        scores.masked_fill_(crossing.hidden, float("-inf"))
    peaks[:, crossing.rows] = peaks[:, crossing.rows].maximum(scores.amax(-1, keepdim=True))
    return crossing, scores


def _multiply_keys(q: Tensor, key: Tensor, scale: float, out: Tensor) -> Tensor:
    return torch.baddbmm(out, q, key.transpose(1, 2), beta=0, alpha=scale, out=out)


def _ordered_product(weights: Tensor, values: Tensor) -> Tensor:
    """``weights @ values``, added up strictly column after column (up to 512 of them)."""
    product: Tensor = _linear(weights, values.t(), None, "none", [], "")
    return product


def _sum_slots(x: Tensor, first: int) -> Tensor:
    """Sum over dim 1, ``_RADIX`` at a time; the first group has the absolute index ``first``.

    Spelled out as additions of halves: ``torch.sum`` picks its order by the other dims. Eats ``x``.
    """
    while True:
        groups = x.shape[1] // _RADIX
        x = x.unflatten(1, (groups, _RADIX))
        while x.shape[2] > 1:
            low, high = x.chunk(2, dim=2)
            x = low.add_(high)
        if groups == 1:
            return x[:, 0, 0]
        aligned = x.new_zeros(x.shape[0], _round_up(first % _RADIX + groups, _RADIX), *x.shape[3:])
        aligned[:, first % _RADIX : first % _RADIX + groups] = x[:, :, 0]
        x = aligned
        first //= _RADIX


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
