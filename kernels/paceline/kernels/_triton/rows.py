"""Row operations on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from paceline.kernels._triton.caches import Caches
from paceline.kernels._triton.jit.rows import add_norm_rows, gate_rows, rotate_rows
from paceline.kernels._triton.plan import Tables
from paceline.kernels.paged import Plane
from paceline.kernels.trees import TreePlan

if TYPE_CHECKING:
    from paceline.kernels.rows import Norm

_GATE_BLOCK = 1024


class TritonRows:
    """One kernel a step (see :class:`paceline.kernels.RowKernels`)."""

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: Norm, dtype: torch.dtype) -> Tensor:
        """See :class:`paceline.kernels.RowKernels`."""
        out = torch.empty_like(x, dtype=dtype)
        block = triton.next_power_of_2(x.shape[1])
        add_norm_rows[(x.shape[0],)](
            x, x if delta is None else delta, norm.weight, out, norm.eps,
            WIDTH=x.shape[1], BLOCK=block, HAS_DELTA=delta is not None,
            num_warps=min(16, max(1, block // 256)),
        )  # fmt: skip
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        """See :class:`paceline.kernels.RowKernels`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        grid = (rows, triton.cdiv(width, _GATE_BLOCK))
        gate_rows[grid](gate_up, out, WIDTH=width, BLOCK=_GATE_BLOCK)
        return out

    def rotate(
        self,
        heads: Tensor,
        norms: tuple[Norm, Norm] | None,
        table: Tensor,
        plan: TreePlan,
        keys: Sequence[Plane],
        values: Sequence[Plane],
    ) -> Tensor:
        """See :class:`paceline.kernels.RowKernels`."""
        caches = Caches.of(keys, values, plan)
        tables = Tables.of(plan, caches.sequences)
        dim = caches.dim
        q_heads = heads.shape[1] // dim - 2 * caches.kv_heads
        q = torch.empty(plan.rows, q_heads, dim, dtype=torch.float32, device=heads.device)
        # Without norms, the kernel reads neither weight.
        given = [(norm.weight, norm.eps) for norm in norms or ()] or [(table, 0.0)] * 2
        (q_weight, q_eps), (k_weight, k_eps) = given
        rotate_rows[(plan.rows, q_heads + 2 * caches.kv_heads)](
            heads, table, plan.positions, q_weight, k_weight, q, caches.keys,
            caches.values, tables.rows.rows, tables.rows.blocks, caches.tables, caches.origins,
            q_eps, k_eps, *caches.strides, caches.tables.stride(0),
            Q_HEADS=q_heads, KV_HEADS=caches.kv_heads, HALF=dim // 2,
            BLOCK=triton.next_power_of_2(dim // 2), PAGE=caches.page_size,
            HAS_NORM=norms is not None, num_warps=1,
        )  # fmt: skip
        return q
