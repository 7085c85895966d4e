"""How much of the copy bandwidth attention reaches, and what noting of scores costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from paceline.bench.gpu.cases import Case, make_case
from paceline.bench.gpu.checking import arguments, finish, graphed, median_ms, report
from paceline.kernels import PagedPlane, Probe, tree_attention

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


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written by a large copy. Unit: GB/s."""
    size = 1 << (32 if device.type == "cuda" else 24)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    return 2 * size / median_ms(lambda: goal.copy_(source), device, repeats=10) / 1e6


def main() -> None:
    """Bandwidth of every shape contiguous and in pages, with and without notes; rivals."""
    device, _ = arguments()
    copied = copy_bandwidth(device)
    report("copy_gb_s", copied)
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
            time = median_ms(graphed(_ours(case, ()), device), device)
            found[kind] = {"ms": time, "of_copy": size / time / 1e6 / copied}
            if paged:
                noted = median_ms(graphed(_ours(case, _probes(case)), device), device)
                found["noting_costs"] = noted / time - 1
            elif len(lengths) == 1:
                found |= {f"{rival}_ms": median_ms(graphed(action, device), device)
                          for rival, action in _rivals(case).items()}  # fmt: skip
        found["kv_bytes"] = size
        found["target"] = TARGETS.get(name)
        report(name, found)
    finish()


def _ours(case: Case, probes: tuple[Probe, ...]) -> Callable[[], object]:
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


def _rivals(case: Case) -> dict[str, Callable[[], object]]:
    """The same work by PyTorch: with a mask, written out, and over a prefix without a mask."""
    segment = case.plan.segments[0]
    key, value = case.keys[0], case.values[0]
    assert not isinstance(key, PagedPlane)
    assert not isinstance(value, PagedPlane)
    key, value = key[None, :, : segment.stop], value[None, :, : segment.stop]
    q = case.q.transpose(0, 1)[None]
    mask = torch.ones(segment.length, segment.stop, dtype=torch.bool)
    mask[:, segment.start :] = torch.from_numpy(segment.ancestors())
    mask = mask.to(q.device)

    def eager() -> object:
        wide, deep = (each.repeat_interleave(4, 1) for each in (key, value))
        scores = (q @ wide.transpose(2, 3)) * case.scale
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ deep

    return {
        "sdpa_with_mask": lambda: scaled_dot_product_attention(
            q, key, value, attn_mask=mask, scale=case.scale, enable_gqa=True
        ),
        "sdpa_of_the_prefix": lambda: scaled_dot_product_attention(
            q, key, value, scale=case.scale, enable_gqa=True
        ),
        "eager_with_mask": eager,
    }


if __name__ == "__main__":
    main()
