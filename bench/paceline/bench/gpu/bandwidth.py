"""Share of the copy bandwidth that attention reaches, and the cost of recording scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.bench.gpu.baselines import BASELINES, Batch, eager_with_mask, missing
from paceline.bench.gpu.cases import Case, make_case
from paceline.bench.gpu.timing import arguments, copy_bandwidth, graphed, median_ms, report
from paceline.kernels import Probe, plan_trees, tree_attention

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


def main() -> None:
    """Report every shape, contiguous and paged, with and without recorded scores, and baselines."""
    device = arguments()
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
            size = sum(segment.stop for segment in case.plan.segments) * 2 * 8 * 128 * 2
            kind = "paged" if paged else "contiguous"
            time = _timed(_ours(case, ()), device)
            found[kind] = {"ms": time, "of_copy": size / time / 1e6 / copied}
            if paged:
                scored = _timed(_ours(case, _probes(case)), device)
                found["cost_of_scores"] = scored / time - 1
            else:
                found |= _baselines(case, device, time)
        found["kv_bytes"] = size
        found["target"] = TARGETS.get(name)
        report(name, found)


def _baselines(case: Case, device: torch.device, time: float) -> dict[str, Any]:
    """Times of other kernels at chains, and of eager attention at the tree of one sequence.

    Args:
        case: Over contiguous caches.
        device: Its device.
        time: Milliseconds of our kernel.
    """
    segments = [replace(segment, parents=None) for segment in case.plan.segments]
    chain = replace(case, plan=plan_trees(segments, device=device))
    ours = _ours(chain, ())
    right = ours().float()
    found: dict[str, Any] = {"chain_ms": _timed(ours, device)}
    times: dict[str, float] = {}
    batch = Batch.of(chain)
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
    if len(segments) == 1:
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
        Probe(index, node, torch.empty(8, segment.start, device=case.q.device))
        for index, segment in enumerate(case.plan.segments)
        for node in dict.fromkeys((0, segment.length - 1))
    )


if __name__ == "__main__":
    main()
