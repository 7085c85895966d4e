"""Other attention kernels at chains of new tokens behind a prefix, where they are installed.

They do not support trees. Each gets keys and values in its own layout, prepared beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline.bench.gpu.cases import Case
from paceline.kernels import TreeSegment

Action = Callable[[], Tensor]
"""Computes attention, ``[M, Hq, D]`` of packed rows."""

PACKAGES = {"flash_attn": "flash_attn", "xformers_split_k": "xformers"}


def missing() -> list[str]:
    """Baselines whose package is not installed."""
    return [name for name, package in PACKAGES.items() if find_spec(package) is None]


@dataclass(frozen=True)
class Batch:
    """The sequences of a case, padded to the longest.

    Attributes:
        q: ``[S, n, Hq, D]``: all blocks have n tokens.
        keys: ``[S, longest, Hkv, D]``.
        values: Likewise.
        lengths: Prefix and block of each. Unit: tokens.
        scale: Factor on the scores.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    lengths: list[int]
    scale: float

    @classmethod
    def of(cls, case: Case) -> Batch:
        """From contiguous caches and blocks of one length."""
        segments = case.plan.segments
        both = (
            [_padded(planes[segment.sequence], segment, segments) for segment in segments]
            for planes in (case.keys, case.values)
        )
        keys, values = (torch.stack(each) for each in both)
        q = case.q.unflatten(0, (len(segments), -1))
        return cls(q, keys, values, [segment.stop for segment in segments], case.scale)


def _padded(plane: Any, segment: TreeSegment, segments: Sequence[TreeSegment]) -> Tensor:
    rows = plane[:, : segment.stop].transpose(0, 1)
    more = max(each.stop for each in segments) - segment.stop
    return torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, more)).contiguous()


def _sdpa(batch: Batch) -> Action:
    """PyTorch; one token needs no mask.

    Raises:
        ValueError: Sequences differ in length, which has no kernel.
    """
    if len(set(batch.lengths)) > 1:
        raise ValueError("sequences differ in length")
    nodes, stop = batch.q.shape[1], batch.lengths[0]
    q, keys, values = (each.transpose(1, 2) for each in (batch.q, batch.keys, batch.values))
    mask = None
    if nodes > 1:
        seen = torch.ones(nodes, stop, dtype=torch.bool, device=q.device)
        mask = seen.tril(stop - nodes)

    def run() -> Tensor:
        out = scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, scale=batch.scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    return run


def _flash(batch: Batch) -> Action:
    """A causal mask is aligned with the end of the keys, as a chain's is."""
    from flash_attn import flash_attn_with_kvcache

    lengths = torch.tensor(batch.lengths, dtype=torch.int32, device=batch.q.device)

    def run() -> Tensor:
        out: Tensor = flash_attn_with_kvcache(
            batch.q, batch.keys, batch.values,
            cache_seqlens=lengths, softmax_scale=batch.scale, causal=True,
        )  # fmt: skip
        return out.flatten(0, 1)

    return run


def _xformers(batch: Batch) -> Action:
    """The split-K kernel, with the heads of a group as a dimension."""
    from xformers.ops import memory_efficient_attention_forward
    from xformers.ops.fmha import triton_splitk
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalWithOffsetPaddedKeysMask

    sequences, nodes, q_heads, dim = batch.q.shape
    longest, kv_heads = batch.keys.shape[1:3]
    group = q_heads // kv_heads
    bias = BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=[nodes] * sequences, kv_seqlen=batch.lengths, kv_padding=longest
    )
    if hasattr(bias, "to"):
        bias = bias.to(batch.q.device)
    q = batch.q.reshape(1, sequences * nodes, kv_heads, group, dim)
    keys, values = (
        each.reshape(1, sequences * longest, kv_heads, 1, dim).expand(-1, -1, -1, group, -1)
        for each in (batch.keys, batch.values)
    )

    def run() -> Tensor:
        out: Tensor = memory_efficient_attention_forward(
            q, keys, values, attn_bias=bias, scale=batch.scale, op=triton_splitk.FwOp
        )
        return out.reshape(sequences * nodes, q_heads, dim)

    return run


BASELINES: dict[str, Callable[[Batch], Action]] = {
    "sdpa": _sdpa,
    "flash_attn": _flash,
    "xformers_split_k": _xformers,
}
"""By name; see :func:`missing`."""


def eager_with_mask(case: Case) -> Action:
    """Tree attention of one sequence in plain PyTorch operations."""
    (segment,) = case.plan.segments
    batch = Batch.of(case)
    group = batch.q.shape[2] // batch.keys.shape[2]
    q, keys, values = (each.transpose(1, 2) for each in (batch.q, batch.keys, batch.values))
    mask = torch.ones(segment.length, segment.stop, dtype=torch.bool)
    mask[:, segment.start :] = torch.from_numpy(segment.ancestors())
    mask = mask.to(q.device)

    def run() -> Tensor:
        wide, deep = (each.repeat_interleave(group, 1) for each in (keys, values))
        scores = (q @ wide.transpose(2, 3)) * case.scale
        out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ deep
        return out.transpose(1, 2).flatten(0, 1)

    return run
