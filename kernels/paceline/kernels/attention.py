"""Tree attention, and the choice of its backend.

Tree attention after LongSpec (section 3.3): unmasked attention over the committed prefix, masked
attention over the block of new nodes, merged by log-sum-exp; on the CPU one kernel does both, chunk
by chunk. Chunks of keys begin at fixed positions, so the operations of a row depend on its own path
alone, and its bits do not depend on the rest of the batch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels import triton
from paceline.kernels._native import cpu_kernels
from paceline.kernels.caches import Plane, head_width
from paceline.kernels.dense import AttentionCall, DenseBackend, Probe
from paceline.kernels.trees import TreePlan

logger = logging.getLogger("paceline.kernels")

BACKENDS = ("triton", "flash_attn", "dense")
VARIABLE = "PACELINE_ATTENTION"
MIN_CAPABILITY = (8, 0)

_FACTORIES: dict[str, Callable[[], AttentionBackend]] = {}
LOADED: dict[str, AttentionBackend] = {}


class AttentionBackend(Protocol):
    """The attention of a kind of device."""

    name: str

    def attend(self, call: AttentionCall) -> None:
        """Write the attention of every packed row, and what the call asks for beside it."""


def register_backend(device_type: str, factory: Callable[[], AttentionBackend]) -> None:
    """Use ``factory`` for devices of ``device_type`` ("cpu", "cuda", ...)."""
    _FACTORIES[device_type] = factory
    LOADED.pop(device_type, None)


def backend_for(device: torch.device | str) -> AttentionBackend:
    """The attention backend of a device.

    Raises:
        RuntimeError: No backend is registered for the device.
    """
    kind = torch.device(device).type
    backend = LOADED.get(kind)
    if backend is not None:
        return backend
    if kind not in _FACTORIES:
        raise RuntimeError(
            f"no attention backend for device type {kind!r}, expected one of "
            f"{sorted(_FACTORIES)}; move the model or register a backend"
        )
    backend = LOADED[kind] = _FACTORIES[kind]()
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

    Row i of a block attends to the block's committed prefix and to its own ancestors and
    itself; with a window, only to those at positions above ``position - window``.

    Args:
        q: Queries after RoPE, ``[M, Hq, D]`` of a float dtype.
        keys: Per sequence, cached keys ``[Hkv, capacity, D]`` (any strides with a dense last
            dimension; see :mod:`paceline.kernels.caches` for int8) or in pages of one pool,
            filled up to ``block.stop``.
        values: Per sequence, cached values, like ``keys``.
        plan: The packed blocks.
        scale: Factor on the scores, usually ``D ** -0.5``.
        cap: Soft cap of the scores, ``cap * tanh(score / cap)``; 0: none.
        window: Sliding window in tokens, or None.
        out: Output, ``[M, Hq, D]`` of any float dtype; allocated in ``q.dtype`` if None.
        probes: Rows whose scores or weights are recorded.
        sinks: float32 ``[Hq]``: one extra logit per head in the softmax denominator, without a
            value (gpt-oss); None: none.

    Returns:
        The attention, ``[M, Hq, D]``. Every row attends at least to itself.

    Raises:
        ValueError: Shapes that do not fit together, or a window below 1.
        RuntimeError: No backend for the device.
    """
    checked = (q.shape, len(keys), keys[0].shape if keys else None, window)
    if checked not in plan.checked:  # once per plan, not per layer
        _check(q, keys, values, plan, window)
        plan.checked.add(checked)
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
    for block in plan.blocks:
        if block.sequence >= len(keys):
            raise ValueError(
                f"a query block names sequence {block.sequence}, but {len(keys)} caches were given"
            )
        key = keys[block.sequence]
        shape = key.shape
        if head_width(key) != q.shape[2] or q.shape[1] % shape[0] or shape[1] < block.stop:
            raise ValueError(
                f"keys of sequence {block.sequence} have shape {tuple(shape)}, expected "
                f"[a divisor of {q.shape[1]}, at least {block.stop}, {q.shape[2]}]"
            )


def _cuda() -> AttentionBackend:
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        logger.warning(
            "%s has compute capability %d.%d: below 8.0 the attention kernels have no tensor cores "
            "for bfloat16 and spill most of their registers, so steps take many times as long; "
            "use a GPU from Ampere on, or --device cpu", torch.cuda.get_device_name(), *capability,
        )  # fmt: skip
    return cuda_backend(preferred_backend())


def cuda_backend(name: str) -> AttentionBackend:
    """A backend for NVIDIA GPUs by its name, or the next one if its package is missing, which is
    logged.

    Args:
        name: One of ``BACKENDS``.
    """
    if name == "dense" or not triton.is_installed():
        return DenseBackend()
    from paceline.kernels.triton.backend import TritonBackend

    if name != "flash_attn":
        return TritonBackend()
    try:
        import_module("flash_attn")
    except ImportError as error:
        logger.warning("%s is flash_attn: Triton attends, since %s", VARIABLE, error)
        return TritonBackend()
    from paceline.kernels.triton.flash import FlashAttention2

    return FlashAttention2()


def preferred_backend() -> str:
    """The backend of GPUs: ``PACELINE_ATTENTION``, else triton.

    Raises:
        RuntimeError: ``PACELINE_ATTENTION`` is not the name of a backend.
    """
    requested = os.environ.get(VARIABLE) or BACKENDS[0]
    if requested not in BACKENDS:
        raise RuntimeError(f"{VARIABLE} is {requested!r}, expected one of {', '.join(BACKENDS)}")
    return requested


def why_bits_vary(device: torch.device | str) -> str:
    """Why a row of attention may have other bits in a batch, a chain, a tree or a prompt than alone
    behind its committed path; empty if it has the same.

    On GPUs that is what the Triton kernels promise, for all models that they serve: sliding
    windows, sinks, recorded scores, any group of heads and any width, and any cut of a prompt. They
    do not promise it for the recorded scores themselves, from which drafters choose KV, and for
    trees whose paths only the device knows, as they are while drafters grow them.
    """
    backend = backend_for(device).name
    if backend == "flash_attn":
        return f"flash-attn, chosen by {VARIABLE}, adds up prompts in an order of its own"
    if backend != "dense":
        return ""
    if torch.device(device).type != "cpu":
        return f"attention runs on operations of PyTorch: install Triton, or unset {VARIABLE}"
    kernels = cpu_kernels()
    if kernels.library is not None:
        return ""
    return (
        f"attention runs on operations of PyTorch: {kernels.origin}; install gcc, or a wheel for "
        "x86-64 Linux, which brings the compiled kernels"
    )


register_backend("cpu", DenseBackend)
register_backend("cuda", _cuda)
