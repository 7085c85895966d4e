"""CPU backend of tree attention, invariant to the batch down to the last bit.

What makes it so (checked by the tests, and at start by ``paceline.decoder.is_batch_invariant``):

- Chunk borders are absolute. A whole chunk is always multiplied as ``CHUNK`` keys whose place in
  the product is their position modulo ``CHUNK``, whether they come from the cache or, for a tree
  that crosses a border, are gathered along a path.
- In the chunk a row stands in, other nodes of the tree lie between its keys. They get weight 0,
  and that product adds strictly one column after the other, so they change nothing.
- Weights are relative to the maximum over all that a row sees, which no grouping changes. Chunks
  are added up in groups of eight that start at absolute multiples of eight, absent ones being
  zeros; the row's own chunk comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.kernels._layout import Crossing, lay_out
from paceline.kernels._workspace import MIN_COLUMNS, RADIX, Scratch, Workspace
from paceline.kernels.probes import Probe, note_scores
from paceline.kernels.trees import CHUNK, TreePlan

_SCORE_BYTES = 64 << 20

_linear: Callable[..., Tensor] | None
try:
    _linear = torch.ops.mkldnn._linear_pointwise.default
except AttributeError:  # a build of torch without oneDNN: works, but promises no bits
    _linear = None


class CpuBackend:
    """Chunked fp32 attention out of MKL and oneDNN matrix products; keeps scratch per thread."""

    name = "cpu"
    pages = False

    def __init__(self) -> None:
        self._scratch = Scratch()

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
        probes: Sequence[Probe] = (),
    ) -> None:
        """See :func:`paceline.kernels.tree_attention`."""
        if not torch.is_inference_mode_enabled():  # scratch is made and written in that mode only
            with torch.inference_mode():
                self.attend(
                    q, keys, values, plan, scale=scale, window=window, out=out, lse=lse,
                    probes=probes,
                )  # fmt: skip
            return
        heads = (q.shape[1], keys[0].shape[0], q.shape[2])
        copy = keys[0].dtype != torch.float32
        blocks = plan.prepared.get((heads, copy, window))
        if blocks is None:
            blocks = self._blocks(plan, *heads, copy, window)
            plan.prepared[heads, copy, window] = blocks
        for sequence, begin, end, work in blocks:
            part = None if lse is None else lse[begin:end]
            attend_block(
                q[begin:end], keys[sequence], values[sequence], work, scale, out[begin:end], part
            )
        note_scores(q, keys, plan, probes, scale=scale, window=window, lse=lse)

    def _blocks(
        self, plan: TreePlan, heads: int, kv_heads: int, dim: int, copy: bool, window: int | None
    ) -> list[tuple[int, int, int, Workspace]]:
        """Cut segments so that the scores of a block stay small: sequence, row range, workspace."""
        blocks: list[tuple[int, int, int, Workspace]] = []
        for segment, row in zip(plan.segments, plan.offsets, strict=False):
            most = max(1, _SCORE_BYTES // (4 * heads * segment.stop))
            for first in range(0, segment.length, most):
                nodes = min(most, segment.length - first)
                layout = lay_out(segment, heads // kv_heads, window, first, nodes)
                work = Workspace(self._scratch, layout, heads, kv_heads, dim, copy)
                blocks.append((segment.sequence, row + first, row + first + nodes, work))
        return blocks


def attend_block(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    work: Workspace,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Attention of the nodes of one block, ``[nodes, Hq, D]``, into ``out``."""
    layout, scores = work.layout, work.scores
    work.packed_by_node.copy_(q.reshape(work.by_node))
    _multiply_keys(work, key, scale)
    if layout.hidden is not None:
        work.maskable.masked_fill_(layout.hidden, float("-inf"))
    torch.amax(scores, -1, keepdim=True, out=work.peaks)
    crossed = [_cross(work, key, crossing, scale) for crossing in layout.crossings]
    scores.sub_(work.peaks).exp_()

    own, own_mass = _own_chunk(work, value)
    if layout.whole_chunks or crossed:
        _whole_chunks(work, value, crossed)
        work.result.add_(own)
        work.mass.add_(own_mass)
    else:
        work.result.copy_(own)
        work.mass.copy_(own_mass)
    torch.div(work.result_by_node, work.mass_by_node, out=out.view(work.by_node))
    if lse is not None:
        torch.add(
            work.mass_by_node.log(),
            work.peaks_by_node,
            out=lse.view(*work.by_node[:3], 1),
        )


def _multiply_keys(work: Workspace, key: Tensor, scale: float) -> None:
    """Scaled scores of every slot looked at."""
    for step in work.key_steps:
        k = key[:, step.slots]
        if step.copy is not None:
            k = step.copy.copy_(k)
        _scores(work.packed, k, scale, step.scores)


def _own_chunk(work: Workspace, value: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted values of each row's own chunk, ``[Hkv, R, D]``, and their weights ``[Hkv, R]``."""
    work.own_values.copy_(value[:, work.own_slots])
    kv_heads, rows, dim = work.packed.shape
    wide = dim + 1
    if not work.own_together:
        products = [
            _ordered_product(weights, values)
            for weights, values in zip(work.own_weights, work.own_factors, strict=True)
        ]
        both = torch.stack(products)
        return both[..., :dim], both[..., dim]
    if work.own_flat is not work.own_weights:
        work.own_flat.copy_(work.own_weights)
    both = _ordered_product(work.own_rows, work.own_factors[0])
    strides = (rows * kv_heads * wide + wide, kv_heads * wide)  # a head's rows, its own columns
    return (
        both.as_strided((kv_heads, rows, dim), (*strides, 1)),
        both.as_strided((kv_heads, rows), strides, dim),
    )


def _whole_chunks(
    work: Workspace, value: Tensor, crossed: Sequence[tuple[Crossing, Tensor]]
) -> None:
    """Add up weighted values and weights of all whole chunks in ``result`` and ``mass``."""
    for gap in work.gaps:
        gap.zero_()
    if work.value_steps:
        torch.sum(work.chunk_weights, -1, out=work.chunk_masses)
    for step in work.value_steps:
        v = value[:, step.slots]
        if step.copy is not None:
            v = step.copy.copy_(v)
        by_head = v.unflatten(1, (step.chunks, CHUNK)).unbind(0)
        for weights, values, sums in zip(step.weights, by_head, step.sums, strict=True):
            torch.bmm(weights, values, out=sums)
    for crossing, scores in crossed:
        weights = scores.sub_(work.peaks[:, crossing.rows]).exp_()
        products = torch.bmm(weights, value[:, crossing.slots].float())
        work.sums[:, work.crossing_slot, crossing.rows] = products
        work.masses[:, work.crossing_slot, crossing.rows] = weights.sum(-1)
    for low, high in work.halves:
        low.add_(high)
    if work.sums.shape[1] > RADIX:
        group = work.layout.first_chunk // RADIX
        work.result.copy_(_sum_groups(work.sums[:, ::RADIX], group))
        work.mass.copy_(_sum_groups(work.masses[:, ::RADIX], group))


def _sum_groups(x: Tensor, first: int) -> Tensor:
    """Sum over dim 1 as a binary tree over the absolute index ``first + i``."""
    while x.shape[1] > 1:
        if first % 2:
            x = torch.cat([torch.zeros_like(x[:, :1]), x], 1)
            first -= 1
        pairs = x[:, 0:-1:2] + x[:, 1::2]
        x = torch.cat([pairs, x[:, -1:]], 1) if x.shape[1] % 2 else pairs
        first //= 2
    return x[:, 0]


def _cross(
    work: Workspace, key: Tensor, crossing: Crossing, scale: float
) -> tuple[Crossing, Tensor]:
    """Scores of a gathered chunk, ``[Hkv, n, CHUNK]``; raises the rows' peaks where needed."""
    q = work.packed[:, crossing.rows]
    scores = torch.empty(q.shape[0], q.shape[1], CHUNK)
    _scores(q, key[:, crossing.slots].float(), scale, scores)
    if crossing.hidden is not None:
        scores.masked_fill_(crossing.hidden, float("-inf"))
    peaks = work.peaks[:, crossing.rows]
    work.peaks[:, crossing.rows] = peaks.maximum(scores.amax(-1, keepdim=True))
    return crossing, scores


def _scores(q: Tensor, key: Tensor, scale: float, out: Tensor) -> None:
    columns = key.shape[1]
    if columns >= MIN_COLUMNS:
        torch.baddbmm(out, q, key.transpose(1, 2), beta=0, alpha=scale, out=out)
        return
    padded = torch.nn.functional.pad(key, (0, 0, 0, MIN_COLUMNS - columns))
    wide = out.new_empty(*out.shape[:2], MIN_COLUMNS)
    _scores(q, padded, scale, wide)
    out.copy_(wide[..., :columns])


def _ordered_product(weights: Tensor, values: Tensor) -> Tensor:
    """``weights @ values``, added up strictly column after column (up to 512 of them)."""
    if _linear is None:
        return weights @ values
    product: Tensor = _linear(weights, values.t(), None, "none", [], "")
    return product
