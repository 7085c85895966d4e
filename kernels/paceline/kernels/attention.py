"""Tree attention, and the choice of its backend.

Hybrid tree attention (LongSpec, section 3.3): unmasked attention over the committed prefix, masked
attention over the block of new nodes, merged by log-sum-exp. Chunks of the prefix begin at absolute
multiples of ``CHUNK``, so the operations of a row depend on its own path alone, and its bits do not
depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, overload

import torch
from torch import Tensor

from paceline.kernels.choice import preferred_backend
from paceline.kernels.paged import PagedPlane, Plane, as_tensors, head_width
from paceline.kernels.probes import Probe
from paceline.kernels.trees import TreePlan


class AttentionBackend(Protocol):
    """The attention of a kind of device; :func:`tree_attention` describes the arguments."""

    name: str
    pages: bool
    """Whether it reads paged caches; if not, it gets contiguous copies."""

    def attend(
        self,
        q: Tensor,
        keys: Sequence[Any],
        values: Sequence[Any],
        plan: TreePlan,
        *,
        scale: float,
        window: int | None,
        out: Tensor,
        lse: Tensor | None,
        probes: Sequence[Probe] = (),
    ) -> None:
        """Write the attention of every packed row into ``out``, its log-sum-exp into ``lse``.

        Fills the probes, without an effect on the result; ``lse`` is given if one needs weights.
        """


_FACTORIES: dict[str, Callable[[], AttentionBackend]] = {}
_LOADED: dict[str, AttentionBackend] = {}


def register_backend(device_type: str, factory: Callable[[], AttentionBackend]) -> None:
    """Use ``factory`` for devices of ``device_type`` ("cpu", "cuda", ...)."""
    _FACTORIES[device_type] = factory
    _LOADED.pop(device_type, None)


def backend_for(device: torch.device | str) -> AttentionBackend:
    """The attention backend of a device.

    Raises:
        RuntimeError: No backend is registered for the device.
    """
    kind = torch.device(device).type
    backend = _LOADED.get(kind)
    if backend is not None:
        return backend
    if kind not in _FACTORIES:
        raise RuntimeError(
            f"no attention backend for device type {kind!r}, expected one of "
            f"{sorted(_FACTORIES)}; move the model or register a backend"
        )
    backend = _LOADED[kind] = _FACTORIES[kind]()
    return backend


@overload
def tree_attention(
    q: Tensor, keys: Sequence[Plane], values: Sequence[Plane], plan: TreePlan, *,
    scale: float, window: int | None = None, return_lse: Literal[False] = False,
    out: Tensor | None = None, probes: Sequence[Probe] = (),
) -> Tensor: ...  # fmt: skip


@overload
def tree_attention(
    q: Tensor, keys: Sequence[Plane], values: Sequence[Plane], plan: TreePlan, *,
    scale: float, window: int | None = None, return_lse: Literal[True],
    out: Tensor | None = None, probes: Sequence[Probe] = (),
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def tree_attention(
    q: Tensor,
    keys: Sequence[Plane],
    values: Sequence[Plane],
    plan: TreePlan,
    *,
    scale: float,
    window: int | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    probes: Sequence[Probe] = (),
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed tree nodes over their own paths.

    Row i of a segment attends to the segment's committed prefix and to its own ancestors and
    itself; with a window, only to those at positions above ``position - window``.

    Args:
        q: Queries after RoPE, ``[M, Hq, D]`` of a float dtype.
        keys: Per sequence, cached keys ``[Hkv, capacity, D]`` (any strides with a dense last
            dimension; see :mod:`paceline.kernels.cache_rows` for int8) or in pages of one pool,
            filled up to ``segment.stop``.
        values: Per sequence, cached values, like ``keys``.
        plan: The packed segments.
        scale: Factor on the scores, usually ``D ** -0.5``.
        window: Sliding window in tokens, or None.
        return_lse: Also return the log-sum-exp of the scaled scores.
        out: Output, ``[M, Hq, D]`` of any float dtype; allocated in ``q.dtype`` if None.
        probes: Rows whose scores or weights are recorded.

    Returns:
        The attention, ``[M, Hq, D]``; with ``return_lse`` also float32 ``[M, Hq]``. Every row
        attends at least to itself.

    Raises:
        ValueError: Shapes that do not fit together, or a window below 1.
        RuntimeError: No backend for the device.
    """
    checked = ("checked", q.shape, len(keys), keys[0].shape if keys else None, window)
    if checked not in plan.prepared:  # once per plan, not per layer
        _check(q, keys, values, plan, window)
        plan.prepared[checked] = True
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    needs_lse = return_lse or any(probe.weights for probe in probes)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if needs_lse else None
    backend = backend_for(q.device)
    if not backend.pages and any(isinstance(each, PagedPlane) for each in (*keys, *values)):
        keys, values = as_tensors(keys, plan), as_tensors(values, plan)
    backend.attend(
        q, keys, values, plan, scale=scale, window=window, out=out, lse=lse, probes=probes
    )
    return (out, lse) if return_lse and lse is not None else out


def _check(
    q: Tensor,
    keys: Sequence[Plane],
    values: Sequence[Plane],
    plan: TreePlan,
    window: int | None,
) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, expected 1 or more, or None for all")
    if q.dim() != 3 or q.shape[0] != plan.rows:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, expected [{plan.rows}, heads, head_dim] for this plan"
        )
    if len(keys) != len(values):
        raise ValueError(f"{len(keys)} key caches but {len(values)} value caches; give one each")
    for segment in plan.segments:
        if segment.sequence >= len(keys):
            raise ValueError(
                f"a segment names sequence {segment.sequence}, but {len(keys)} caches were given"
            )
        key = keys[segment.sequence]
        shape = key.shape
        if head_width(key) != q.shape[2] or q.shape[1] % shape[0] or shape[1] < segment.stop:
            raise ValueError(
                f"keys of sequence {segment.sequence} have shape {tuple(shape)}, expected "
                f"[a divisor of {q.shape[1]}, at least {segment.stop}, {q.shape[2]}]"
            )


def _cpu() -> AttentionBackend:
    from paceline.kernels._native import library

    native = library()
    if native is None:
        return _dense()
    from paceline.kernels._native_attention import NativeBackend

    return NativeBackend(native, fallback=_dense())


def _dense() -> AttentionBackend:
    from paceline.kernels._dense import DenseBackend

    return DenseBackend()


def _cuda() -> AttentionBackend:
    return cuda_backend(preferred_backend(torch.cuda.get_device_name()))


def cuda_backend(name: str) -> AttentionBackend:
    """A backend for NVIDIA GPUs by its name, or the next one if its package is missing.

    Args:
        name: flash_attn, triton or dense.
    """
    if name == "flash_attn":
        with suppress(ImportError):
            from paceline.kernels._triton.flash import FlashBackend

            return FlashBackend()
    if name != "dense":
        with suppress(ImportError):
            from paceline.kernels._triton.backend import TritonBackend

            return TritonBackend()
    return _dense()


register_backend("cpu", _cpu)
register_backend("cuda", _cuda)
