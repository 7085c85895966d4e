"""Attention of installed packages: FlashAttention 2 and 3, FlashInfer.

Where all blocks are chains, as in prompts and plain decoding, a package attends to prefix and block
in one causal call. Else it attends to whole tiles of the prefix, and the project's kernels to the
rest; both are merged by log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paceline.kernels._triton.backend import Caches, TritonBackend, attend, read_call
from paceline.kernels._triton.plan import ProbeTable, Tiling
from paceline.kernels.dense import AttentionCall
from paceline.kernels.trees import TreePlan, send


class Batch:
    """The blocks of a plan of which a package sees keys, row after row.

    Attributes:
        causal: A mask is aligned with the end of rows and keys; else all rows see all keys.
        rows: Their rows in the plan, int64 ``[m]``; None: all.
        counts: Rows of each block.
        keys: Keys of each block.
        tables: Page tables, int32 ``[blocks, n]``.
    """

    def __init__(self, plan: TreePlan, tile: int, caches: Caches) -> None:
        """Take the blocks, with whole tiles of ``tile`` keys where one is no chain."""
        self.causal = all(segment.is_chain for segment in plan.segments)
        blocks = [
            (segment, first, keys)
            for segment, first in zip(plan.segments, plan.offsets, strict=False)
            if (keys := segment.stop if self.causal else segment.start // tile * tile)
        ]
        self._device = plan.device
        self.counts = [segment.length for segment, _, _ in blocks]
        self.keys = [keys for _, _, keys in blocks]
        self.rows: Tensor | None = None
        if len(blocks) < len(plan.segments):
            self.rows = self._there(
                [first + node for segment, first, _ in blocks for node in range(segment.length)]
            )
        which = self._there([caches.sequences[segment.sequence] for segment, _, _ in blocks])
        self.tables = caches.tables[which]

    @property
    def widest(self) -> int:
        """Rows of the longest block."""
        return max(self.counts)

    def starts(self) -> list[int]:
        """Row where each block starts, and the end."""
        return [sum(self.counts[:block]) for block in range(len(self.counts) + 1)]

    @cached_property
    def lengths_there(self) -> Tensor:
        """Keys of each block, int32 on the device."""
        return self._there(self.keys, torch.int32)

    @cached_property
    def starts_there(self) -> Tensor:
        """:meth:`starts`, int32 on the device."""
        return self._there(self.starts(), torch.int32)

    @cached_property
    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows as ``[blocks, widest]``, padded in front; block and place there of each row."""
        places = [
            (block, self.widest - count + node)
            for block, count in enumerate(self.counts)
            for node in range(count)
        ]
        rows = [
            [start + max(0, place - self.widest + count) for place in range(self.widest)]
            for start, count in zip(self.starts(), self.counts, strict=False)
        ]
        block, place = zip(*places, strict=True)
        return self._there(rows), self._there(block), self._there(place)

    def _there(self, numbers: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return send(torch.tensor(numbers, dtype=dtype), self._device)


Attend = Callable[[Tensor, Tensor, Tensor, Batch, float], tuple[Tensor, Tensor]]
"""Queries ``[m, Hq, D]``, keys and values in pages ``[pages, Hkv, slots, D]``, all of one type of
16 bits; batch; factor on scores. Returns the attention ``[m, Hq, D]`` and the log-sum-exp of
scores, float32 ``[m, Hq]``."""


def flash_attention_2() -> Attend:
    """Of the package flash-attn. Raises ImportError without it."""
    from flash_attn import flash_attn_with_kvcache

    def run(
        q: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float
    ) -> tuple[Tensor, Tensor]:
        rows, block, place = batch.padded
        found, lse = flash_attn_with_kvcache(
            q[rows],
            keys.transpose(1, 2),
            values.transpose(1, 2),
            cache_seqlens=batch.lengths_there,
            block_table=batch.tables,
            softmax_scale=scale,
            causal=batch.causal,
            return_softmax_lse=True,
        )
        return found[block, place], lse.transpose(1, 2)[block, place]

    return run


def flash_attention_3() -> Attend:
    """Of the module flash_attn_interface. Raises ImportError without it."""
    from flash_attn_interface import flash_attn_with_kvcache

    def run(
        q: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float
    ) -> tuple[Tensor, Tensor]:
        found, lse, *_ = flash_attn_with_kvcache(
            q,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            cache_seqlens=batch.lengths_there,
            page_table=batch.tables,
            cu_seqlens_q=batch.starts_there,
            max_seqlen_q=batch.widest,
            softmax_scale=scale,
            causal=batch.causal,
            return_softmax_lse=True,
        )
        return found, lse.T

    return run


_WORKSPACE = 128 << 20  # bytes, as FlashInfer's documentation recommends


def flash_infer() -> Attend:
    """Of the package flashinfer: its kernels for prompts, which its decoding on tensor cores uses
    too. Raises ImportError without it."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    wrapper: Any = None
    planned: object = None

    def run(
        q: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float
    ) -> tuple[Tensor, Tensor]:
        nonlocal wrapper, planned
        if wrapper is None:
            workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device)
            wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wanted = batch, q.shape[1:], keys.shape[1:], q.dtype, scale
        if wanted != planned:  # once for all layers
            page = keys.shape[2]
            pages = [-(-count // page) for count in batch.keys]
            ends = [sum(pages[:block]) for block in range(len(pages) + 1)]
            wrapper.plan(
                torch.tensor(batch.starts(), dtype=torch.int32),
                torch.tensor(ends, dtype=torch.int32),
                torch.cat([row[:n] for row, n in zip(batch.tables, pages, strict=True)]),
                torch.tensor([(count - 1) % page + 1 for count in batch.keys], dtype=torch.int32),
                q.shape[1],
                keys.shape[1],
                q.shape[2],
                page,
                causal=batch.causal,
                sm_scale=scale,
                q_data_type=q.dtype,
                kv_data_type=keys.dtype,
            )
            planned = wanted
        found, lse = wrapper.run(q, (keys, values), return_lse=True)
        return found, lse * math.log(2)  # it is to base 2

    return run


@dataclass(frozen=True)
class Package:
    """An installed package.

    Attributes:
        load: Imports it; raises ImportError if it is not installed.
        page: Pages have a multiple of so many slots.
        dims: Widths of heads.
    """

    load: Callable[[], Attend]
    page: int
    dims: Container[int]


PACKAGES: Mapping[str, Package] = {
    "flash_attn": Package(flash_attention_2, 256, range(8, 257, 8)),
    "flash_attn_3": Package(flash_attention_3, 1, range(8, 257, 8)),
    "flashinfer": Package(flash_infer, 1, (64, 128, 256)),
}
"""By the names of :data:`paceline.kernels.attention.BACKENDS`."""


class PackageBackend(TritonBackend):
    """Attention of a package, over paged caches in half precision.

    Windows, sinks, probes, contiguous caches, widths of heads that the package lacks and plans of
    CUDA graphs are left to :class:`TritonBackend`.
    """

    def __init__(self, name: str) -> None:
        """Use a package of ``PACKAGES``.

        Raises:
            ImportError: It is not installed.
        """
        self.name = name
        self._package = PACKAGES[name]
        self._attend = self._package.load()

    def attend(self, call: AttentionCall) -> None:
        """See :class:`paceline.kernels.AttentionBackend`."""
        caches, tables, tiling = read_call(call)
        if not self._can(call, caches, tiling):
            super().attend(call)
            return
        q, plan = call.q, call.plan
        key = ("package", tiling.keys, caches.sequences)
        if key not in plan.prepared:
            plan.prepared[key] = Batch(plan, tiling.keys, caches)
        batch: Batch = plan.prepared[key]
        if not batch.counts:
            super().attend(call)
            return
        half = q.to(caches.keys.dtype)
        rows = slice(None) if batch.rows is None else batch.rows
        found, lse = self._attend(half[rows], caches.keys, caches.values, batch, call.scale)
        if batch.causal:
            out, out_lse = found, lse
        else:
            out = torch.empty_like(q, dtype=torch.float32)
            out_lse = q.new_empty(q.shape[:2], dtype=torch.float32)
            behind = replace(tiling, prefix=False)
            unprobed = ProbeTable.of((), plan, tiling)
            attend(q.contiguous(), caches, tables, behind, unprobed, call.scale, out, out_lse)
            rest, rest_lse = out[rows], out_lse[rows]
            share = torch.sigmoid(lse - rest_lse)[..., None]
            out[rows] = torch.lerp(rest, found.float(), share)
            out_lse[rows] = torch.logaddexp(lse, rest_lse)
        call.out.copy_(out)
        if call.lse is not None:
            call.lse.copy_(out_lse)

    def _can(self, call: AttentionCall, caches: Caches, tiling: Tiling) -> bool:
        package = self._package
        return bool(
            call.plan.segments
            and not call.probes
            and call.sinks is None
            and not tiling.window
            and caches.page_size
            and caches.page_size % package.page == 0
            and caches.dim in package.dims
            and caches.keys.dtype != torch.float32
        )
