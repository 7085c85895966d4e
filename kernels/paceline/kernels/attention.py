"""Tree attention, and the choice of its backend.

Hybrid tree attention (LongSpec, section 3.3): unmasked attention over the committed prefix, masked
attention over the block of new nodes, merged by log-sum-exp. Chunks of the prefix begin at absolute
multiples of ``CHUNK``, so the operations of a row depend on its own path alone, and its bits do not
depend on the rest of the batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels.caches import Plane, head_width
from paceline.kernels.dense import AttentionCall, DenseBackend, Probe
from paceline.kernels.trees import TreePlan


class AttentionBackend(Protocol):
    """The attention of a kind of device."""

    name: str

    def attend(self, call: AttentionCall) -> None:
        """Write the attention of every packed row, and what the call asks for beside it."""


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


def tree_attention(
    q: Tensor,
    keys: Sequence[Plane],
    values: Sequence[Plane],
    plan: TreePlan,
    *,
    scale: float,
    cap: float = 0.0,
    window: int | None = None,
    out: Tensor | None = None,
    probes: Sequence[Probe] = (),
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of packed tree nodes over their own paths.

    Row i of a segment attends to the segment's committed prefix and to its own ancestors and
    itself; with a window, only to those at positions above ``position - window``.

    Args:
        q: Queries after RoPE, ``[M, Hq, D]`` of a float dtype.
        keys: Per sequence, cached keys ``[Hkv, capacity, D]`` (any strides with a dense last
            dimension; see :mod:`paceline.kernels.caches` for int8) or in pages of one pool,
            filled up to ``segment.stop``.
        values: Per sequence, cached values, like ``keys``.
        plan: The packed segments.
        scale: Factor on the scores, usually ``D ** -0.5``.
        cap: Soft cap of the scores, ``cap * tanh(score / cap)``; 0: none.
        window: Sliding window in tokens, or None.
        out: Output, ``[M, Hq, D]`` of any float dtype; allocated in ``q.dtype`` if None.
        probes: Rows whose scores or weights are recorded.
        sinks: float32 ``[Hq]``: a score more in the sum of each head's weights, without a value
            (gpt-oss); None: none.

    Returns:
        The attention, ``[M, Hq, D]``. Every row attends at least to itself.

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
    needs_lse = any(probe.weights for probe in probes)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if needs_lse else None
    call = AttentionCall(q, keys, values, plan, scale, window, out, lse, probes, cap, sinks)
    backend_for(q.device).attend(call)
    return out


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


def _cuda() -> AttentionBackend:
    return cuda_backend(preferred_backend(torch.cuda.get_device_name()))


def cuda_backend(name: str) -> AttentionBackend:
    """A backend for NVIDIA GPUs by its name, or the next one if its package is missing.

    Args:
        name: One of ``BACKENDS``.
    """
    if name not in ("triton", "dense"):
        with suppress(ImportError):
            from paceline.kernels._triton.flash import PackageBackend

            return PackageBackend(name)
    if name != "dense":
        with suppress(ImportError):
            from paceline.kernels._triton.backend import TritonBackend

            return TritonBackend()
    return DenseBackend()


BACKENDS = ("triton", "flash_attn", "flash_attn_3", "flashinfer", "dense")
VARIABLE = "PACELINE_ATTENTION"


def preferred_backend(device_name: str) -> str:
    """The backend of a kind of GPU: ``PACELINE_ATTENTION``, else the fastest measured, else triton.

    Args:
        device_name: PyTorch's name of the GPU.

    Raises:
        RuntimeError: ``PACELINE_ATTENTION`` is not the name of a backend.
    """
    requested = os.environ.get(VARIABLE, "")
    if requested and requested not in BACKENDS:
        raise RuntimeError(f"{VARIABLE} is {requested!r}, expected one of {', '.join(BACKENDS)}")
    measured = _measured().get(device_name, "")
    return requested or (measured if measured in BACKENDS else BACKENDS[0])


def remember_backend(device_name: str, backend: str) -> Path:
    """Store the fastest backend of a kind of GPU for later starts; returns the file."""
    path = _choice_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_measured() | {device_name: backend}, indent=1) + "\n")
    return path


def _measured() -> dict[str, str]:
    try:
        found = json.loads(_choice_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _choice_file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "paceline" / "attention.json"


register_backend("cpu", DenseBackend)
register_backend("cuda", _cuda)
