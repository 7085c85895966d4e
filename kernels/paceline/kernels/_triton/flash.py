"""Attention over the committed prefix by flash-attn, over the rest by the project's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.kernels._triton.backend import TritonBackend, attend
from paceline.kernels._triton.caches import Caches
from paceline.kernels._triton.notes import NotedRows
from paceline.kernels._triton.plan import Tables, Tiling
from paceline.kernels.paged import Plane
from paceline.kernels.probes import Probe
from paceline.kernels.trees import TreePlan

_PAGE_MULTIPLE = 256  # of flash-attn's paged caches


class FlashBackend(TritonBackend):
    """``flash_attn_with_kvcache`` over whole tiles of the prefix, merged by log-sum-exp.

    It serves paged caches in half precision. Windows, probes, contiguous caches and plans of CUDA
    graphs are left to :class:`TritonBackend`.
    """

    name = "flash_attn"

    def __init__(self, attend_prefix: Callable[..., tuple[Tensor, Tensor]] | None = None) -> None:
        """Use flash-attn's function, or another with its arguments.

        Raises:
            ImportError: flash-attn is not installed.
        """
        if attend_prefix is None:
            from flash_attn import flash_attn_with_kvcache

            attend_prefix = flash_attn_with_kvcache
        self._attend_prefix = attend_prefix

    def attend(
        self,
        q: Tensor,
        keys: Sequence[Plane],
        values: Sequence[Plane],
        plan: TreePlan,
        *,
        scale: float,
        window: int | None,
        out: Tensor,
        lse: Tensor | None,
        probes: Sequence[Probe] = (),
    ) -> None:
        """See :func:`paceline.kernels.tree_attention`."""
        caches = Caches.of(keys, values, plan)
        tables = Tables.of(plan, caches.sequences)
        tiling = tables.tiling(q.shape[1] // caches.kv_heads, caches.keys, window)
        if not self._can(caches, plan, tiling, probes):
            super().attend(
                q, keys, values, plan, scale=scale, window=window, out=out, lse=lse, probes=probes
            )
            return
        prefix, prefix_lse, seen = self._prefix(q, caches, plan, tiling, scale)
        rest = torch.empty_like(q, dtype=torch.float32)
        rest_lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        behind = replace(tiling, prefix=False)
        attend(q.contiguous(), caches, tables.rows, tables.work(behind), behind,
               NotedRows.of((), plan, tiling), scale, rest, rest_lse)  # fmt: skip
        # The log-sum-exp of an empty prefix is undefined.
        share = torch.where(seen[:, None], torch.sigmoid(prefix_lse - rest_lse), 0.0)[..., None]
        out.copy_(torch.where(share > 0, torch.lerp(rest, prefix.float(), share), rest))
        if lse is not None:
            both = torch.logaddexp(prefix_lse, rest_lse)
            lse.copy_(torch.where(seen[:, None], both, rest_lse))

    def _can(self, caches: Caches, plan: TreePlan, tiling: Tiling, probes: Sequence[Probe]) -> bool:
        return bool(
            plan.segments
            and not probes
            and not tiling.window
            and caches.page_size
            and caches.page_size % _PAGE_MULTIPLE == 0
            and caches.keys.dtype != torch.float32
        )

    def _prefix(
        self, q: Tensor, caches: Caches, plan: TreePlan, tiling: Tiling, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention of every packed row, its log-sum-exp, and whether it has a prefix."""
        key = ("flash", tiling.keys, caches.sequences)
        if key not in plan.prepared:
            plan.prepared[key] = _Batch(plan, tiling.keys, caches.sequences)
        batch: _Batch = plan.prepared[key]
        found, lse = self._attend_prefix(
            q.to(caches.keys.dtype)[batch.rows],
            caches.keys.transpose(1, 2),
            caches.values.transpose(1, 2),
            cache_seqlens=batch.lengths,
            block_table=caches.tables[batch.table_rows],
            softmax_scale=scale,
            causal=False,
            return_softmax_lse=True,
        )
        at = (batch.block, batch.node)
        return found[at], lse.transpose(1, 2)[at], batch.seen


class _Batch:
    """The blocks of a plan as a padded batch, ``[S, widest]``."""

    def __init__(self, plan: TreePlan, tile: int, table_rows: tuple[int, ...]) -> None:
        segments = plan.segments
        widest = max(segment.length for segment in segments)
        padded = [
            [first + min(node, segment.length - 1) for node in range(widest)]
            for segment, first in zip(segments, plan.offsets, strict=False)
        ]
        blocks = [index for index, segment in enumerate(segments) for _ in range(segment.length)]
        nodes = [node for segment in segments for node in range(segment.length)]
        # Up to the tile in which new nodes begin; the project's kernels run from there on.
        lengths = [segment.start // tile * tile for segment in segments]

        def there(numbers: Any, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(numbers, dtype=dtype).to(plan.device)

        self.rows = there(padded)
        self.block, self.node = there(blocks), there(nodes)
        self.lengths = there(lengths, torch.int32)
        self.table_rows = there([table_rows[segment.sequence] for segment in segments])
        self.seen = self.lengths[self.block] > 0
