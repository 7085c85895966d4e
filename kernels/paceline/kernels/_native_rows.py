"""Row kernels in C, see ``native/rows.c``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.kernels._native import LANES
from paceline.kernels._native_attention import CACHE_TYPES, CacheTable
from paceline.kernels.paged import PagedPlane, head_width
from paceline.kernels.trees import TreePlan

if TYPE_CHECKING:
    from paceline.kernels.rows import Norm, RowKernels

_WIDEST_HEAD = 512
_BF16 = torch.bfloat16


class _Heads(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("q_heads", "kv_heads", "dim")],
        *[(name, ctypes.c_void_p) for name in ("q_weight", "k_weight")],
        ("eps", ctypes.c_float),
    ]


class _Rotation(ctypes.Structure):
    _fields_ = [
        ("heads", _Heads),
        *[(name, ctypes.c_int64) for name in ("rows", "heads_bf16", "kv_type")],
        *[(name, ctypes.c_void_p) for name in ("sequence", "slot", "position")],
    ]


class NativeRows:
    """Compiled row kernels; ``fallback`` runs widths that are no multiple of a vector."""

    def __init__(self, library: ctypes.CDLL, fallback: RowKernels) -> None:
        self._fallback = fallback
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._add_norm = library.paceline_add_norm
        self._add_norm.argtypes = (*[pointer] * 3, ctypes.c_float, pointer, *[number] * 4)
        self._gate = library.paceline_gate
        self._gate.argtypes = (*[pointer] * 2, *[number] * 3)
        self._rotate = library.paceline_rotate
        self._rotate.argtypes = [pointer] * 6
        for function in (self._add_norm, self._gate, self._rotate):
            function.restype = None

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: Norm, dtype: torch.dtype) -> Tensor:
        """See :class:`RowKernels`."""
        rows, width = x.shape
        if width % LANES:
            return self._fallback.add_norm(x, delta, norm, dtype)
        out = torch.empty(rows, width, dtype=dtype)
        self._add_norm(
            x.data_ptr(), None if delta is None else delta.data_ptr(), norm.weight.data_ptr(),
            norm.eps, out.data_ptr(), rows, width,
            delta is not None and delta.dtype is _BF16, dtype is _BF16,
        )  # fmt: skip
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        """See :class:`RowKernels`."""
        rows, both = gate_up.shape
        if both % (2 * LANES):
            return self._fallback.gate(gate_up)
        out = torch.empty(rows, both // 2, dtype=gate_up.dtype)
        bf16 = gate_up.dtype is _BF16
        self._gate(gate_up.data_ptr(), out.data_ptr(), rows, both // 2, bf16)
        return out

    def rotate(
        self,
        heads: Tensor,
        norms: tuple[Norm, Norm] | None,
        table: Tensor,
        plan: TreePlan,
        keys: Sequence[Any],
        values: Sequence[Any],
    ) -> Tensor:
        """See :class:`RowKernels`."""
        dim, kv_heads = table.shape[1], keys[0].shape[0]
        if dim % LANES or dim > _WIDEST_HEAD or isinstance(keys[0], PagedPlane):
            return self._fallback.rotate(heads, norms, table, plan, keys, values)
        q_heads = heads.shape[1] // dim - 2 * kv_heads
        prepared = plan.prepared.get("rotate")
        if prepared is None:
            prepared = plan.prepared["rotate"] = _prepare(plan, heads, keys[0], q_heads)
        q = torch.empty(plan.rows, q_heads, dim)
        caches = CacheTable.of(plan, keys, values)
        if norms is not None:
            of_heads = prepared[0].heads
            of_heads.q_weight, of_heads.k_weight = (norm.weight.data_ptr() for norm in norms)
            of_heads.eps = norms[0].eps
        self._rotate(
            ctypes.addressof(prepared[0]), heads.data_ptr(), table.data_ptr(), q.data_ptr(),
            caches.keys, caches.values,
        )  # fmt: skip
        return q


def _prepare(
    plan: TreePlan, heads: Tensor, key: Tensor, q_heads: int
) -> tuple[_Rotation, list[Any]]:
    """The plan's tables for the kernel without norms, and the arrays that they point into."""
    lengths = [segment.length for segment in plan.segments]
    sequence = np.repeat(np.array([s.sequence for s in plan.segments], np.int64), lengths)
    slot = np.concatenate([np.arange(s.start, s.stop) for s in plan.segments])
    position = plan.positions.numpy()
    made = _Rotation(
        heads=_Heads(q_heads=q_heads, kv_heads=key.shape[0], dim=head_width(key)),
        rows=plan.rows,
        heads_bf16=heads.dtype is _BF16,
        kv_type=CACHE_TYPES.index(key.dtype),
        sequence=sequence.ctypes.data,
        slot=slot.ctypes.data,
        position=position.ctypes.data,
    )
    return made, [sequence, slot, position]
