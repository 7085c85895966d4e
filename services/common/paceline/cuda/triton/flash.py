"""Attention of prompts by the package flash-attn (FlashAttention 2), where equal bits are not
asked for: it adds up in an order of its own, so a prompt has other bits than the same tokens have
in decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.cuda.triton.backend import Caches
from paceline.cuda.triton.kernels import TritonKernels
from paceline.kernels.attention import AttentionCall
from paceline.kernels.caches import PagedPlane
from paceline.kernels.trees import TreePlan, send

_PAGE = 256  # pages of flash-attn have a multiple of so many slots
_WIDTHS = range(8, 257, 8)  # of its heads


class _Batch:
    """The blocks of a plan, in the form of the package."""

    def __init__(self, plan: TreePlan, caches: Caches) -> None:
        counts = [block.length for block in plan.blocks]
        widest = max(counts)
        padded = [
            [first + max(0, place - widest + count) for place in range(widest)]
            for first, count in zip(plan.offsets, counts, strict=False)
        ]
        places = [
            (block, widest - count + node)
            for block, count in enumerate(counts)
            for node in range(count)
        ]

        def there(numbers: Any, dtype: torch.dtype = torch.int64) -> Tensor:
            return send(torch.tensor(numbers, dtype=dtype), plan.device)

        self.plan, self.sequences = plan, caches.sequences
        # Keys of each block, int32 `[S]`.
        self.lengths = there([block.stop for block in plan.blocks], torch.int32)
        which = there([caches.sequences[block.sequence] for block in plan.blocks])
        self.tables = caches.tables[which]  # page tables, int32 `[S, n]`
        self.rows = there(padded)  # rows of the blocks as `[S, widest]`, padded in front
        self.places = there(places).unbind(1)  # block and place there of each row, two int64 `[M]`


class FlashAttention2(TritonKernels):
    """Prompts over paged caches in half precision by flash-attn, all else by Triton kernels."""

    name = "flash_attn"

    def __init__(self) -> None:
        """Import the package. Raises ``ImportError``: it is not installed."""
        from flash_attn import flash_attn_with_kvcache

        self._run = flash_attn_with_kvcache
        self._batch: _Batch | None = None

    def attend(self, call: AttentionCall) -> None:
        if not self._can(call):
            super().attend(call)
            return
        caches, batch = Caches.of(call.keys, call.values, call.plan), self._batch
        if batch is None or batch.plan is not call.plan or batch.sequences != caches.sequences:
            batch = self._batch = _Batch(call.plan, caches)  # once for all layers
        out, lse = self._run(
            call.q.to(caches.keys.dtype)[batch.rows], caches.keys.transpose(1, 2),
            caches.values.transpose(1, 2), cache_seqlens=batch.lengths, block_table=batch.tables,
            softmax_scale=call.scale, causal=True, return_softmax_lse=True,
        )  # fmt: skip
        call.out.copy_(out[batch.places])
        if call.lse is not None:
            call.lse.copy_(lse.transpose(1, 2)[batch.places])

    def _can(self, call: AttentionCall) -> bool:
        key = call.keys[0]
        return bool(
            isinstance(key, PagedPlane)
            and key.page_size % _PAGE == 0
            and key.dtype != torch.float32
            and call.q.shape[2] in _WIDTHS
            and call.plan.blocks
            and all(block.final for block in call.plan.blocks)
            and not call.probes
            and call.sinks is None
            and not call.window
        )
