"""Share of the copy bandwidth that attention reaches, and the cost of recording scores.

Other kernels are measured beside it. They do not support trees: they get chains of new tokens
behind a prefix, and keys and values in their own layout, prepared beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline.bench.gpu.cases import (
    Case,
    arguments,
    copy_bandwidth,
    fail_if_missed,
    graphed,
    make_case,
    median_ms,
    report,
)
from paceline.kernels import Probe, QueryBlock, plan_trees, tree_attention

Action = Callable[[], Tensor]
"""Computes attention, ``[M, Hq, D]`` of packed rows."""

PACKAGES = {"flash_attn": "flash_attn", "xformers_split_k": "xformers"}

SHAPES: dict[str, tuple[list[int], int]] = {
    "64 rows, 8 x 32k": ([32768] * 8, 16),
    "1 x 128k, 16 nodes": ([131072], 16),
    "1 x 128k, 1 node": ([131072], 1),
    "1 x 32k, 16 nodes": ([32768], 16),
    "1 x 32k, 1 node": ([32768], 1),
    "1 x 32k, 64 nodes": ([32768], 64),
    "ragged": ([131072, 40000, 3000, 200], 16),
}
"""Prefix lengths and nodes; 32 query heads share 8 kv heads of 128."""

TARGETS = {"64 rows, 8 x 32k": 0.85, "1 x 128k, 16 nodes": 0.80, "1 x 32k, 16 nodes": 0.60}
"""Least shares of the copy bandwidth, paged."""

COST_OF_SCORES = 1.05
"""Most time of these shapes with recorded scores, over that without."""


def missing() -> list[str]:
    """Baselines whose package is not installed."""
    return [name for name, package in PACKAGES.items() if find_spec(package) is None]


@dataclass(frozen=True)
class PaddedBatch:
    """The sequences of a case, padded to the longest."""

    q: Tensor
    """``[S, n, Hq, D]``: all blocks have n tokens."""

    keys: Tensor
    """``[S, longest, Hkv, D]``."""

    values: Tensor
    """Likewise."""

    lengths: list[int]
    """Prefix and block of each. Unit: tokens."""

    scale: float
    """Factor on the scores."""

    @classmethod
    def of(cls, case: Case) -> PaddedBatch:
        """From contiguous caches and blocks of one length."""
        blocks = case.plan.blocks
        both = (
            [_padded(planes[block.sequence], block, blocks) for block in blocks]
            for planes in (case.keys, case.values)
        )
        keys, values = (torch.stack(each) for each in both)
        q = case.q.unflatten(0, (len(blocks), -1))
        return cls(q, keys, values, [block.stop for block in blocks], case.scale)


def _padded(plane: Any, block: QueryBlock, blocks: Sequence[QueryBlock]) -> Tensor:
    rows = plane[:, : block.stop].transpose(0, 1)
    more = max(each.stop for each in blocks) - block.stop
    return torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, more)).contiguous()


def _sdpa(batch: PaddedBatch) -> Action:
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


def _flash(batch: PaddedBatch) -> Action:
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


def _xformers(batch: PaddedBatch) -> Action:
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


BASELINES: dict[str, Callable[[PaddedBatch], Action]] = {
    "sdpa": _sdpa,
    "flash_attn": _flash,
    "xformers_split_k": _xformers,
}
"""By name; see :func:`missing`."""


def eager_with_mask(case: Case) -> Action:
    """Tree attention of one sequence in plain PyTorch operations."""
    (block,) = case.plan.blocks
    batch = PaddedBatch.of(case)
    group = batch.q.shape[2] // batch.keys.shape[2]
    q, keys, values = (each.transpose(1, 2) for each in (batch.q, batch.keys, batch.values))
    mask = torch.ones(block.length, block.stop, dtype=torch.bool)
    mask[:, block.start :] = torch.from_numpy(block.ancestors())
    mask = mask.to(q.device)

    def run() -> Tensor:
        wide, deep = (each.repeat_interleave(group, 1) for each in (keys, values))
        scores = (q @ wide.transpose(2, 3)) * case.scale
        out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ deep
        return out.transpose(1, 2).flatten(0, 1)

    return run


def main() -> None:
    """Report every shape, contiguous and paged, with and without recorded scores, and baselines.

    Fails if a shape misses its target.
    """
    device = arguments()
    missed: list[str] = []
    copied = copy_bandwidth(device)
    report("copy_gb_s", copied)
    report("baselines_not_installed", missing())
    for name, (lengths, nodes) in SHAPES.items():
        if device.type == "cpu":
            lengths = [max(1, length // 256) for length in lengths]
        found: dict[str, Any] = {}
        for paged in (False, True):
            case = make_case(
                device, lengths, [nodes] * len(lengths), (32, 8), 128, torch.bfloat16, paged=paged
            )
            size = sum(block.stop for block in case.plan.blocks) * 2 * 8 * 128 * 2
            kind = "paged" if paged else "contiguous"
            time = _timed(_ours(case, ()), device)
            found[kind] = {"ms": time, "of_copy": size / time / 1e6 / copied}
            if paged:
                scored = _timed(_ours(case, _probes(case)), device)
                found["scores_over_without"] = scored / time
            else:
                found |= _baselines(case, device, time)
        found["kv_bytes"] = size
        found["target"] = target = TARGETS.get(name)
        report(name, found)
        if target is not None:
            if found["paged"]["of_copy"] < target:
                missed.append(f"{name}: below {target:.0%} of copy bandwidth")
            if found["scores_over_without"] > COST_OF_SCORES:
                missed.append(f"{name}: recorded scores take more than {COST_OF_SCORES - 1:.0%}")
    fail_if_missed(missed, device)


def _baselines(case: Case, device: torch.device, time: float) -> dict[str, Any]:
    """Times of other kernels at chains, and of eager attention at the tree of one sequence.

    Args:
        case: Over contiguous caches.
        device: Its device.
        time: Milliseconds of our kernel.
    """
    blocks = [replace(block, parents=None) for block in case.plan.blocks]
    chain = replace(case, plan=plan_trees(blocks, device=device))
    ours = _ours(chain, ())
    right = ours().float()
    found: dict[str, Any] = {"chain_ms": _timed(ours, device)}
    times: dict[str, float] = {}
    batch = PaddedBatch.of(chain)
    for name in sorted(BASELINES.keys() - missing()):
        try:
            action = BASELINES[name](batch)
            gap = float((action().float() - right).abs().max())
            if gap < 0.05:
                times[name] = found[f"{name}_ms"] = _timed(action, device)
            else:
                found[name] = f"its result differs by {gap}"
        except Exception as error:  # of another package
            found[name] = f"cannot do it: {error}"[:200]
    if times:
        found["best_baseline_over_ours"] = min(times.values()) / found["chain_ms"]
    if len(blocks) == 1:
        found["eager_with_mask_ms"] = _timed(eager_with_mask(case), device)
        found["eager_over_ours"] = found["eager_with_mask_ms"] / time
    return found


def _timed(action: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a replay."""
    return median_ms(graphed(action, device), device)


def _ours(case: Case, probes: tuple[Probe, ...]) -> Callable[[], Tensor]:
    out = torch.full_like(case.q, torch.nan)
    return lambda: tree_attention(
        case.q, case.keys, case.values, case.plan, scale=case.scale, out=out, probes=probes
    )


def _probes(case: Case) -> tuple[Probe, ...]:
    return tuple(
        Probe(index, node, torch.empty(8, block.start, device=case.q.device))
        for index, block in enumerate(case.plan.blocks)
        for node in dict.fromkeys((0, block.length - 1))
    )


if __name__ == "__main__":
    main()
