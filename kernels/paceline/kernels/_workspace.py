"""Scratch memory of the CPU backend, and the views into it that one block uses in every layer.

Making a view costs as much as a small operation, so they are made once per plan.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels._layout import BlockLayout
from paceline.kernels.trees import CHUNK, MAX_TREE_NODES

KV_SCRATCH_BYTES = 32 << 20
MIN_COLUMNS = 16
"""Products with fewer columns take another path, with other bits."""
RADIX = 8
"""Whole chunks added up at once."""
_FEW_ROWS = 64  # up to here one product for all kv heads is faster than one for each
_OWN_COLUMNS = CHUNK - 1 + MAX_TREE_NODES


class Scratch(threading.local):
    """Float32 memory by name, one per thread; taking a name again invalidates what it held."""

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}
        self._ones: dict[tuple[int, ...], Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A dense tensor of this shape with unspecified content."""
        numel = 1
        for size in shape:
            numel *= size
        flat = self._flat.get(name)
        if flat is None or flat.numel() < numel:
            flat = self._flat[name] = torch.zeros(numel)
        return flat[:numel].view(shape)

    def ones(self, *shape: int) -> Tensor:
        """The one tensor of this shape, 1 where nothing was ever written."""
        found = self._ones.get(shape)
        if found is None:
            found = self._ones[shape] = torch.ones(shape)
        return found


@dataclass(frozen=True)
class KeyStep:
    """Scores of some slots: ``scores = packed @ keys[:, slots].T``.

    Attributes:
        slots: Slots of the cache.
        copy: Where to put their keys in float32, ``[Hkv, n, D]``; None to read the cache itself.
        scores: Where the scores go, ``[Hkv, R, n]``.
    """

    slots: slice
    copy: Tensor | None
    scores: Tensor


@dataclass(frozen=True)
class ValueStep:
    """Weighted values of some whole chunks.

    Attributes:
        slots: Slots of the cache.
        copy: Where to put their values in float32, ``[Hkv, n, D]``; None to read the cache itself.
        chunks: Number of chunks.
        weights: Per kv head, ``[chunks, R, CHUNK]``.
        sums: Per kv head, where the products go, ``[chunks, R, D]``.
    """

    slots: slice
    copy: Tensor | None
    chunks: int
    weights: tuple[Tensor, ...]
    sums: tuple[Tensor, ...]


class Workspace:
    """Views for one block. R is ``layout.padded``; head dim D."""

    def __init__(
        self, scratch: Scratch, layout: BlockLayout, heads: int, kv_heads: int, dim: int, copy: bool
    ) -> None:
        """Lay the block out in scratch; ``copy`` if the cache is not float32."""
        rows, columns, group = layout.padded, layout.columns, heads // kv_heads
        self.layout = layout
        self.by_node = (layout.nodes, kv_heads, group, dim)
        """Shape of a block's queries with the GQA groups apart."""
        self.packed = scratch.take("q", kv_heads, rows, dim)
        """Queries ``[Hkv, R, D]``; the padding rows may hold anything, no row minds another."""
        self.packed_by_node = self._nodes_first(self.packed)
        self.scores = scratch.take("s", kv_heads, rows, columns)
        """Scores, later weights, ``[Hkv, R, columns]``."""
        hidden = layout.hidden
        self.maskable = self.scores if hidden is None else self.scores[..., -hidden.shape[1] :]
        """The part of the scores that ``layout.hidden`` speaks of."""
        self.peaks = scratch.take("m", kv_heads, rows, 1)
        self.key_steps = tuple(self._key_steps(scratch, kv_heads, dim, copy))
        self._lay_out_own(scratch, kv_heads, dim)
        self._lay_out_whole(scratch, kv_heads, dim, copy)
        self.result_by_node = self._nodes_first(self.result)
        self.mass_by_node = self._nodes_first(self.mass.unsqueeze(-1))

    @property
    def peaks_by_node(self) -> Tensor:
        """Largest score of every row, ``[nodes, Hkv, group, 1]``."""
        return self._nodes_first(self.peaks)

    def _nodes_first(self, x: Tensor) -> Tensor:
        """View ``[Hkv, R, n]`` as ``[nodes, Hkv, group, n]``."""
        nodes, kv_heads, group, _ = self.by_node
        by_head, by_row, by_column = x.stride()
        strides = (group * by_row, by_head, by_row, by_column)
        return x.as_strided((nodes, kv_heads, group, x.shape[2]), strides, x.storage_offset())

    def _key_steps(
        self, scratch: Scratch, kv_heads: int, dim: int, copy: bool
    ) -> Iterator[KeyStep]:
        base, columns = self.layout.base, self.layout.columns
        step = columns
        if copy:
            chunks = max(1, KV_SCRATCH_BYTES // (4 * kv_heads * dim * CHUNK))
            step = min(columns, chunks * CHUNK)
        begin = 0
        while begin < columns:
            end = begin + step
            if columns - end < MIN_COLUMNS:  # never leave a few columns for a last step
                end = columns
            yield KeyStep(
                slots=slice(base + begin, base + end),
                copy=scratch.take("kv", kv_heads, end - begin, dim) if copy else None,
                scores=self.scores[..., begin:end] if end - begin < columns else self.scores,
            )
            begin = end

    def _lay_out_own(self, scratch: Scratch, kv_heads: int, dim: int) -> None:
        """The rows' own chunk; a last column of ones in the values sums the weights."""
        layout, rows = self.layout, self.layout.padded
        begin = layout.own_chunk * CHUNK
        count = layout.stop - begin
        self.own_slots = slice(begin, layout.stop)
        self.own_weights = self.scores[..., -count:]
        """Weights in each row's own chunk, ``[Hkv, R, n]``."""
        self.own_together = kv_heads * rows <= _FEW_ROWS
        if self.own_together:
            values = scratch.ones(_OWN_COLUMNS, kv_heads, dim + 1)[:count]
            self.own_values = values[..., :dim].transpose(0, 1)
            self.own_factors = (values.flatten(1),)
            self.own_flat = self.own_weights
            if layout.whole_chunks:
                self.own_flat = scratch.take("w", kv_heads, rows, count)
            self.own_rows = self.own_flat.view(kv_heads * rows, count)
        else:
            values = scratch.ones(kv_heads, _OWN_COLUMNS, dim + 1)[:, :count]
            self.own_values = values[..., :dim]
            self.own_factors = tuple(values)

    def _lay_out_whole(self, scratch: Scratch, kv_heads: int, dim: int, copy: bool) -> None:
        """Whole chunks: sums of each, and the halves to add until one is left."""
        layout, rows = self.layout, self.layout.padded
        count = layout.whole_chunks
        skip = layout.first_chunk % RADIX
        last = skip + count
        self.crossing_slot = last
        slots = _slots(skip, last + bool(layout.crossings))
        self.sums = scratch.take("sums", kv_heads, slots, rows, dim)
        self.masses = scratch.take("masses", kv_heads, slots, rows)
        gaps = [slice(a, b) for a, b in ((0, skip), (last, slots)) if b > a]
        self.gaps = [x[:, gap] for gap in gaps for x in (self.sums, self.masses)]
        """What must be zero, because no chunk writes there."""
        self.halves = tuple(_halves(self.sums)) + tuple(_halves(self.masses))
        self.result = self.sums[:, 0]
        """Weighted values of all chunks, ``[Hkv, R, D]``, once everything is added up."""
        self.mass = self.masses[:, 0]
        """Total weights, ``[Hkv, R]``."""
        self.value_steps: list[ValueStep] = []
        if not count:
            return
        weights = self.scores[..., : count * CHUNK].unflatten(2, (count, CHUNK)).transpose(1, 2)
        self.chunk_weights = weights
        self.chunk_masses = self.masses[:, skip:last]
        step = count
        if copy:
            step = max(1, KV_SCRATCH_BYTES // (4 * kv_heads * dim * CHUNK))
        for begin in range(0, count, step):
            end = min(begin + step, count)
            at = slice(layout.base + begin * CHUNK, layout.base + end * CHUNK)
            self.value_steps.append(
                ValueStep(
                    slots=at,
                    copy=scratch.take("kv", kv_heads, at.stop - at.start, dim) if copy else None,
                    chunks=end - begin,
                    weights=tuple(weights[:, begin:end]),
                    sums=tuple(self.sums[:, skip + begin : skip + end]),
                )
            )


def _slots(skip: int, last: int) -> int:
    """Room for slots up to ``last``: whole groups, or less where more zeros change nothing."""
    if skip or last > RADIX:
        return -(-last // RADIX) * RADIX
    return 1 << max(0, last - 1).bit_length()


def _halves(x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs to add, second onto first, so that each group of ``x`` ends in its first slot.

    Spelled out because ``torch.sum`` picks its order by the other dims.
    """
    size = min(RADIX, x.shape[1])
    x = x.unflatten(1, (x.shape[1] // size, size))
    while size > 1:
        size //= 2
        yield x[:, :, :size], x[:, :, size : 2 * size]
