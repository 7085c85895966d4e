"""What a GPU runs in the place of the compiled CPU kernels, chosen once for a kind of device, and
attention by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline.kernels.attention import AttentionCall, Probe
from paceline.kernels.caches import Plane, head_width
from paceline.kernels.trees import TreePlan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from paceline.kernels.rows import RowKernels
    from paceline.kernels.sampling import SamplingRules


class DeviceKernels(Protocol):
    """The kernels of a kind of device. None of them waits for the device."""

    name: str  # of the package that attends

    @property
    def rows(self) -> RowKernels:
        """The row-wise operations."""

    def attend(self, call: AttentionCall) -> None:
        """Write the attention of every packed row, and what the call asks for beside it."""

    def quantise_rows(self, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """See :func:`paceline.kernels.rotated.quantise_rows`."""

    def scale_sums(
        self, sums: Tensor, rows: Tensor, outs: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """See :func:`paceline.kernels.rotated.scale_sums`."""

    def multiply_by_experts(
        self, x: Tensor, weights: Tensor, bias: Tensor | None, chosen: Tensor
    ) -> Tensor:
        """Multiply rows ``[n, ins]`` by matrices ``[experts, outs, ins]`` add biases ``[experts,
        outs]`` of the same type: each row by its expert's, int64 ``[n]``, rising."""

    def perturb(
        self,
        logits: Tensor,
        params: Sequence[SamplingRules],
        positions: Sequence[int],
        ids: Tensor | None,
    ) -> Tensor:
        """See :func:`paceline.kernels.perturbed_logits`."""

    def accept_drafts(
        self, scores: Tensor, tokens: Tensor, drafts: NDArray[np.int64], chances: NDArray[np.int64]
    ) -> None:
        """Replace the tokens of rows with drafts, their largest scores' ids, int64 ``[R]``, by
        tokens of rejection sampling.

        ``scores`` are filtered logits over temperature, float32 ``[R, V]``, dense; ``drafts``,
        int64 ``[D, 5]``, row, token, seed, position, and the sum of the probabilities as float64;
        ``chances`` the probabilities of all drafts: place in ``[D, V]`` and the float32 bits, int64
        ``[2, n]``.
        """

    def best_candidates(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """See :func:`paceline.kernels.best_candidates`."""


# By type of device. Tests and measurements add reference kernels for "cpu".
LOADED: dict[str, DeviceKernels] = {}
LOADERS: dict[str, Callable[[], DeviceKernels]] = {}  # called at the first use


def kernels_for(device: torch.device | str) -> DeviceKernels:
    """Return the kernels of a device. Raises ``RuntimeError``: there are none: on a CPU compiled
    programs run, and nothing but them."""
    kind = torch.device(device).type
    if kind not in LOADED:
        if kind not in LOADERS:
            raise RuntimeError(f"there are no kernels for device type {kind!r}")
        LOADED[kind] = LOADERS[kind]()
    return LOADED[kind]


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
    """Return the attention of packed tree nodes over their own paths.

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
        RuntimeError: No kernels for the device.
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
    kernels_for(q.device).attend(call)
    return out


def _check(
    q: Tensor, keys: Sequence[Plane], values: Sequence[Plane], plan: TreePlan, window: int | None
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
