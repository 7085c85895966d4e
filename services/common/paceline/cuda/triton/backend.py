"""Tree attention, row operations and sampling on NVIDIA GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from paceline.cuda.triton.jit.attention import LOG2E, attend_items, merge_items, record_items
from paceline.cuda.triton.jit.rows import add_norm_rows, gate_rows, rotate_rows
from paceline.cuda.triton.jit.sampling import (
    ID_BITS,
    accept_or_resample,
    collect_span,
    find_best,
    find_border,
    find_candidates,
    finish_border,
    perturb,
    sum_chances,
    sum_residuals,
    weigh_spans,
)
from paceline.cuda.triton.plan import MASK_ALIGN, MASK_WORDS, PlanTables, RowTables, WorkTables
from paceline.cuda.triton.probes import ProbeTable
from paceline.cuda.triton.tiles import Tiling, little_shared_memory, part_row_bytes, programs
from paceline.kernels.attention import AttentionCall
from paceline.kernels.caches import PagedPlane, Plane
from paceline.kernels.trees import TreePlan, send

if TYPE_CHECKING:
    from paceline.kernels.rotated import IntSums
    from paceline.kernels.rows import Norm
    from paceline.kernels.sampling import SamplingRules

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ALIGN = 16
MERGE_CHUNKS = 16  # chunks of a row that are merged at a time

# Option of kernels whose results have the same bits in every batch and by every variant: products
# and sums are not contracted, or loops with and without a mask, and noise with and without a
# filter, could round differently.
EXACT = {"enable_fp_fusion": False}
_GATE_BLOCK = 1024

# Ids that a program filters, and its candidates for the search for a row's border.
CHUNK, BESTS = 2048, 64
SEARCH_BLOCK, NOISE_BLOCK = 4096, 1024
SPANS, ROOM = 32, 16384  # spans of values below the candidates, and keys that are collected of one


@dataclass(frozen=True)
class Caches:
    """Keys and values of one layer for every sequence of a plan."""

    keys: Tensor  # the tensor that all key offsets are relative to
    values: Tensor  # values of the layer, likewise
    kv_heads: int  # key/value heads
    dim: int  # elements of a head
    page_size: int  # slots of a page; 0: every sequence is contiguous
    # Strides of keys, then of values: between pages, heads, slots; zeros where contiguous.
    strides: tuple[int, ...]
    tables: Tensor  # page tables, int32 `[rows, n]`; unused for contiguous caches
    align: int  # all origins and strides in `origins` are multiples of it. Unit: elements.
    # Origin, head stride and slot stride per sequence of keys and values, int64 `[n, 2, 3]`; unused
    # for paged caches. Unit: elements.
    origins: Tensor
    sequences: tuple[int, ...]  # row of the page tables of each sequence, or its number

    @classmethod
    def of(cls, keys: Sequence[Plane], values: Sequence[Plane], plan: TreePlan) -> Caches:
        """Describe the caches of one call. Raises ``ValueError``: they differ in type or pool, or
        the type has no kernels."""
        paged = [plane for plane in (*keys, *values) if isinstance(plane, PagedPlane)]
        if not paged:
            return _contiguous([k for k in keys if isinstance(k, Tensor)],
                               [v for v in values if isinstance(v, Tensor)], plan)  # fmt: skip
        rows = tuple(plane.row for plane in keys if isinstance(plane, PagedPlane))
        first_key, first_value = keys[0], values[0]
        if (
            len(paged) != len(keys) + len(values)
            or not isinstance(first_key, PagedPlane)
            or not isinstance(first_value, PagedPlane)
            or len({plane.pool.data_ptr() for plane in paged}) > 2
            or len({plane.tables.data_ptr() for plane in paged}) > 1
        ):
            raise ValueError("all caches of one call must lie in one pool, or none in any")
        key_pool, value_pool = first_key.pool, first_value.pool
        _check_dtypes({key_pool.dtype, value_pool.dtype})
        none = PlanTables.of(plan).none(plan.device)
        return cls(
            key_pool, value_pool, key_pool.shape[1], key_pool.shape[3], key_pool.shape[2],
            (*key_pool.stride()[:3], *value_pool.stride()[:3]),
            first_key.tables, 1, none, rows,
        )  # fmt: skip


def places(
    keys: Sequence[Tensor], values: Sequence[Tensor], bases: tuple[Tensor, Tensor]
) -> tuple[tuple[int, ...], ...]:
    """Return origin, head stride and slot stride of each sequence's keys and values."""
    return tuple(
        (_distance(tensor, base), *tensor.stride()[:2])
        for pair in zip(keys, values, strict=True)
        for tensor, base in zip(pair, bases, strict=True)
    )


def aligned(where: Sequence[tuple[int, ...]]) -> bool:
    """Return whether wide loads are possible at all of these places."""
    return not any(number % _ALIGN for row in where for number in row)


def _contiguous(keys: Sequence[Tensor], values: Sequence[Tensor], plan: TreePlan) -> Caches:
    _check_dtypes({tensor.dtype for tensor in (*keys, *values)})
    tables = PlanTables.of(plan)
    cached = tables.captured_places(keys[0])
    if cached is None:
        where = places(keys, values, (keys[0], values[0]))
        cached = tables.places_of(where, keys[0], wide=aligned(where))
    return Caches(
        keys[0], values[0], keys[0].shape[0], keys[0].shape[2], 0, (0,) * 6,
        cached.tables.view(1, 4), _ALIGN if cached.wide else 1, cached.origins,
        tuple(range(len(keys))),
    )  # fmt: skip


def _distance(tensor: Tensor, base: Tensor) -> int:
    """Return the distance between two tensors' addresses. Unit: elements."""
    return (tensor.data_ptr() - base.data_ptr()) // tensor.element_size()


def _check_dtypes(dtypes: set[torch.dtype]) -> None:
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        raise ValueError(
            f"keys and values have the types {sorted(map(str, dtypes))}, expected one of "
            f"{', '.join(map(str, _DTYPES))} for all"
        )


@dataclass(frozen=True)
class Launch:
    """The kernels of one call. All tensors but the caches are dense."""

    caches: Caches  # keys and values
    tiling: Tiling  # sizes of tiles
    rows: RowTables  # packed rows, as many as queries or fewer
    work: WorkTables  # work items

    @classmethod
    def of(cls, call: AttentionCall) -> Launch:
        caches, tables = Caches.of(call.keys, call.values, call.plan), PlanTables.of(call.plan)
        group = call.q.shape[1] // caches.kv_heads
        tiling = Tiling.of(group, caches.keys, call.window)
        row_bytes = part_row_bytes(caches.kv_heads, caches.dim)
        return cls(
            caches, tiling, tables.rows_of(call.plan, caches.sequences),
            tables.work_of(call.plan, tiling, row_bytes),
        )  # fmt: skip

    def attend(
        self,
        q: Tensor,
        probed: ProbeTable,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
    ) -> None:
        """Run both kernels over queries ``[M, Hq, D]``, for parts of the work one after the other.
        Writes ``out`` ``[M, Hq, D]``, ``lse``, float32 ``[M, Hq]`` or None, and the scores that
        ``probed`` names; ``sinks`` are float32 ``[Hq]`` or None."""
        caches, rows, work = self.caches, self.rows, self.work
        kv_heads, dim, count = caches.kv_heads, caches.dim, work.part_rows
        shape, options = attend_shape(
            self.tiling, dim, caches.page_size, probed.count, tree=rows.masks is not None,
            device=q.device,
        )  # fmt: skip
        part = q.new_empty((kv_heads, count, dim), dtype=torch.float32)
        part_lse = q.new_empty((kv_heads, count), dtype=torch.float32)
        grid = (min(programs(q.device), len(work.items) * kv_heads),)
        for span in work.spans:
            attend_items[grid](
                q, caches.keys, caches.values, part, part_lse, span, work.items, work.tiles,
                work.places, work.steps, rows.blocks, rows.rows,
                rows.rows if rows.masks is None else rows.masks, caches.tables, caches.origins,
                probed.table, probed.base, probed.layer, scale * LOG2E, kv_heads, count,
                *caches.strides, caches.tables.stride(0),
                **shape, ALIGN=caches.align, **options,
            )  # fmt: skip
            merge_items[(rows.rows.shape[0], q.shape[1])](
                part, part_lse, out, part_lse if lse is None else lse, span, work.tiles,
                work.places, rows.rows, part_lse if sinks is None else sinks, count,
                GROUP=self.tiling.group, DIM=dim, WIDE=shape["WIDE"], USED=self.tiling.used,
                CHUNKS=MERGE_CHUNKS, HAS_LSE=lse is not None, HAS_SINKS=sinks is not None,
                num_warps=2, **EXACT,
            )  # fmt: skip

    def record(self, q: Tensor, probed: ProbeTable, scale: float, lse: Tensor) -> None:
        """Record the weights, and the scores of further rows, that ``probed`` names. ``lse``: of
        the same attention, float32 ``[M, Hq]``; the others are as for :meth:`attend`."""
        caches, rows, work = self.caches, self.rows, self.work
        shape, options = record_shape(self.tiling, caches.dim, caches.page_size)
        grid = (min(programs(q.device), len(work.items) * caches.kv_heads),)
        for span in work.spans:
            record_items[grid](
                q, caches.keys, lse, span, work.items, work.tiles, work.places, rows.blocks,
                rows.rows, caches.tables, caches.origins, probed.wanted, probed.noted, probed.base,
                probed.layer, scale * LOG2E, caches.kv_heads, *caches.strides[:3],
                caches.tables.stride(0), **shape, ALIGN=caches.align, **options,
            )  # fmt: skip


def attend_shape(
    tiling: Tiling, dim: int, page_size: int, probes: int, *, tree: bool, device: torch.device
) -> tuple[dict[str, int], dict[str, int]]:
    """Return constants and launch options of the first kernel, for heads of ``dim`` elements, pages
    of ``page_size`` slots (0: contiguous caches), and so many recorded rows of a block. ``tree``:
    only the device knows the paths."""
    wide = max(16, triton.next_power_of_2(dim))
    # Loads of page numbers need two stages. With recorded scores, one stage less leaves shared
    # memory for two programs on a multiprocessor. Stages change no bit.
    stages = (5 - bool(probes)) if page_size else 3
    if little_shared_memory(device):
        stages = min(stages, 4)
    shape = {
        "GROUP": tiling.group, "DIM": dim, "WIDE": wide, "BLOCK_M": tiling.rows,
        "BLOCK_N": tiling.keys, "PAGE": page_size, "WINDOW": tiling.window, "TREE": tree,
        "MASK_WORDS": MASK_WORDS, "MASK_ALIGN": MASK_ALIGN, "PROBES": probes, "STAGES": stages,
    }  # fmt: skip
    return shape, {"num_warps": _warps(tiling.rows, wide), **EXACT}


def record_shape(tiling: Tiling, dim: int, page_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return constants and launch options of the kernel of :meth:`Launch.record`."""
    wide = max(16, triton.next_power_of_2(dim))
    heads = triton.next_power_of_2(tiling.group)
    nodes = triton.next_power_of_2(tiling.used // tiling.group)
    shape = {
        "GROUP": tiling.group, "HEADS": heads, "NODES": nodes, "DIM": dim, "WIDE": wide,
        "BLOCK_N": tiling.keys, "PAGE": page_size, "WINDOW": tiling.window, "STAGES": 3,
    }  # fmt: skip
    return shape, {"num_warps": _warps(nodes * heads, wide)}


def _warps(rows: int, width: int) -> int:
    """Return how many warps have the registers for a tile."""
    return 8 if rows * width > 64 * 128 else 4


class TritonRows:
    """One kernel a step (see :class:`paceline.kernels.rows.RowKernels`)."""

    scale_sums = True

    def add_norm(
        self, x: Tensor, delta: Tensor | IntSums | None, norm: Norm, dtype: torch.dtype
    ) -> Tensor:
        out = torch.empty_like(x, dtype=dtype)
        block = triton.next_power_of_2(x.shape[1])
        source, scales, options = _read(x if delta is None else delta)
        add_norm_rows[(x.shape[0],)](
            x, source, norm.weight, out, norm.eps, *scales,
            WIDTH=x.shape[1], BLOCK=block, HAS_DELTA=delta is not None,
            **options, num_warps=min(16, max(1, block // 256)),
        )  # fmt: skip
        return out

    def gate(self, gate_up: Tensor | IntSums) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        source, scales, options = _read(gate_up)
        out = torch.empty(rows, width, dtype=gate_up.dtype, device=source.device)
        grid = (rows, triton.cdiv(width, _GATE_BLOCK))
        gate_rows[grid](source, out, *scales, WIDTH=width, BLOCK=_GATE_BLOCK, **options)
        return out

    def rotate(
        self,
        heads: Tensor | IntSums,
        norms: tuple[Norm, Norm] | None,
        table: Tensor,
        plan: TreePlan,
        keys: Sequence[Plane],
        values: Sequence[Plane],
    ) -> Tensor:
        caches = Caches.of(keys, values, plan)
        rows = PlanTables.of(plan).rows_of(plan, caches.sequences)
        dim = caches.dim
        q_heads = heads.shape[1] // dim - 2 * caches.kv_heads
        source, scales, options = _read(heads)
        q = torch.empty(plan.rows, q_heads, dim, dtype=torch.float32, device=source.device)
        # Without norms, the kernel reads neither weight.
        given = [(norm.weight, norm.eps) for norm in norms or ()] or [(table, 0.0)] * 2
        (q_weight, q_eps), (k_weight, k_eps) = given
        rotate_rows[(plan.rows, q_heads + 2 * caches.kv_heads)](
            source, table, plan.positions, q_weight, k_weight, q, caches.keys,
            caches.values, rows.rows, rows.blocks, caches.tables, caches.origins,
            q_eps, k_eps, *caches.strides, caches.tables.stride(0), *scales,
            Q_HEADS=q_heads, KV_HEADS=caches.kv_heads, HALF=dim // 2,
            BLOCK=triton.next_power_of_2(dim // 2), PAGE=caches.page_size,
            HAS_NORM=norms is not None, **options, num_warps=1,
        )  # fmt: skip
        return q


def _read(given: Tensor | IntSums) -> tuple[Tensor, tuple[Tensor, ...], dict[str, Any]]:
    """Return what a kernel reads a product from: the product or its sums, their scales and bias,
    and the constants and launch options."""
    if isinstance(given, Tensor):
        return given, (given,) * 3, {"STRIDE": given.shape[1], "SCALED": 0}
    bias, scaled = (given.outs, 1) if given.bias is None else (given.bias, 2)
    options = {"STRIDE": given.sums.stride(0), "SCALED": scaled, **EXACT}
    return given.sums, (given.rows, given.outs, bias), options


def perturbed(
    logits: Tensor,
    params: Sequence[SamplingRules],
    positions: Sequence[int],
    ids: Tensor | None = None,
) -> Tensor:
    """See :func:`paceline.kernels.perturbed_logits`."""
    vocab = logits.shape[1]
    if vocab > 1 << ID_BITS.value:
        raise ValueError(f"{vocab} tokens, expected at most {1 << ID_BITS.value}")
    record = send(torch.from_numpy(sampling_record(params, positions)), logits.device)
    filtered = any(rule.top_k or rule.top_p < 1 or rule.min_p for rule in params)
    return perturbed_by(logits, record, ids, filtered=filtered)


def perturbed_by(logits: Tensor, record: Tensor, ids: Tensor | None, *, filtered: bool) -> Tensor:
    """:func:`perturbed` with the rows' parameters as :func:`sampling_record` has them, on the
    device; whether a row has a filter is known."""
    rows, vocab = logits.shape
    borders = find_borders(logits, record) if filtered else record
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    perturb[(rows, triton.cdiv(vocab, NOISE_BLOCK))](
        logits, out, record if ids is None else ids, record, record.view(torch.float64), borders,
        vocab, logits.stride(0), FILTERED=filtered, REDUCED=ids is not None, BLOCK=NOISE_BLOCK,
        **EXACT,
    )  # fmt: skip
    return out


def find_borders(logits: Tensor, record: Tensor) -> Tensor:
    """Return the least key of each row that its filters keep, int64 ``[R]``, for ``perturb``;
    ``record`` as for :func:`perturbed_by`."""
    rows, vocab = logits.shape
    floats = record.view(torch.float64)
    chunks = triton.cdiv(vocab, CHUNK)
    stride = logits.stride(0)
    best = record.new_empty(rows, chunks)
    candidates, sums = record.new_empty(rows, chunks, BESTS), record.new_empty(rows, 2, chunks)
    borders = record.new_empty(rows)
    sizes = {"CHUNKS": triton.next_power_of_2(chunks), "BESTS": BESTS}
    find_best[(rows, chunks)](logits, floats, best, vocab, stride, CHUNK=CHUNK)
    find_candidates[(rows, chunks)](
        logits, record, floats, best, candidates, sums, vocab, stride, CHUNK=CHUNK, **sizes,
        num_warps=8,
    )  # fmt: skip
    pending = record.new_empty(rows, 3 + SPANS)
    find_border[(rows,)](
        logits, record, floats, best, candidates, sums, borders, pending, vocab, stride, chunks,
        **sizes, BLOCK=SEARCH_BLOCK, SPANS=SPANS, num_warps=8,
    )  # fmt: skip
    row = (logits, record, floats, best, pending)
    spans, keys = record.new_empty(rows, chunks, SPANS), record.new_empty(rows, ROOM)
    filled = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    sizes = {"CHUNKS": sizes["CHUNKS"], "SPANS": SPANS}
    weigh_spans[(rows, chunks)](*row, spans, vocab, stride, CHUNK=CHUNK, **sizes, num_warps=8)
    collect_span[(rows, chunks)](
        logits, floats, pending, spans, filled, keys, vocab, stride,
        CHUNK=CHUNK, ROOM=ROOM, **sizes, num_warps=8,
    )  # fmt: skip
    finish_border[(rows,)](
        *row, spans, filled, keys, borders, vocab, stride, chunks, ROOM=ROOM,
        BLOCK=SEARCH_BLOCK, **sizes, num_warps=8,
    )  # fmt: skip
    return borders


def accept_drafts(
    scores: Tensor, tokens: Tensor, drafts: NDArray[np.int64], chances: NDArray[np.int64]
) -> None:
    """See :class:`paceline.kernels.DeviceKernels`."""
    count, vocab = len(drafts), scores.shape[1]
    flat = send(torch.from_numpy(np.concatenate([drafts, chances], axis=None)), scores.device)
    record, places, bits = flat.split([drafts.size, chances.shape[1], chances.shape[1]])
    q = torch.zeros(count * vocab, dtype=torch.float32, device=scores.device)
    q.index_copy_(0, places, bits.to(torch.int32).view(torch.float32))
    highest = scores.gather(1, tokens[:, None])[:, 0]
    chunks = triton.cdiv(vocab, CHUNK)
    sums, rests = record.new_empty(2, count, chunks, dtype=torch.float64)
    floats, sizes = record.view(torch.float64), {"CHUNKS": triton.next_power_of_2(chunks)}
    sum_chances[(count, chunks)](scores, record, highest, sums, vocab, BLOCK=CHUNK)
    sum_residuals[(count, chunks)](
        scores, record, floats, q, highest, sums, rests, vocab, BLOCK=CHUNK, **sizes
    )
    accept_or_resample[(count,)](
        scores, record, floats, q, highest, sums, rests, tokens, vocab, chunks,
        BLOCK=CHUNK, **sizes, num_warps=8,
    )  # fmt: skip


def sampling_record(params: Sequence[SamplingRules], positions: Sequence[int]) -> NDArray[np.int64]:
    """Return the numbers of each row, int64 ``[R, 6]``: seed, position, top_k, and as float64
    temperature, log min_p and top_p."""
    seeds = np.array([rule.seed for rule in params], np.uint64).view(np.int64)
    integers = np.stack([seeds, np.array(positions), np.array([rule.top_k for rule in params])], 1)
    floats = [
        (rule.temperature, math.log(rule.min_p) if rule.min_p else -math.inf, rule.top_p)
        for rule in params
    ]
    return np.concatenate([integers, np.array(floats).view(np.int64)], 1)
