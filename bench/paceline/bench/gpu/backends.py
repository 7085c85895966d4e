"""Compares the attention backends that are installed, and remembers the fastest.

`paceline.kernels.attention` uses the result at later starts on this kind of GPU. Runs by itself
too: ``python -m paceline.bench.gpu.backends cuda 0``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from paceline.bench.gpu.cases import arguments, expected, make_case, median_ms, report
from paceline.kernels import AttentionBackend, plan_trees
from paceline.kernels.attention import BACKENDS, cuda_backend, remember_backend
from paceline.kernels.dense import AttentionCall

SHAPES = {
    "1 x 32k, 16 nodes": ([32768], 16, False),
    "8 x 8k, 1 node": ([8192] * 8, 1, False),
    "prompts, 4 x 8k, 256 tokens": ([8192] * 4, 256, True),
}
"""Prefix lengths, nodes of each, and whether they are chains."""

_TOLERANCE = 0.02  # against float64


def main() -> None:
    """Choose by the geometric mean over the shapes; what fails or is wrong is left out."""
    device = arguments()
    if device.type == "cpu":
        report("skipped", "these backends are for NVIDIA GPUs")
        return
    means: dict[str, float] = {}
    for name in BACKENDS[:-1]:  # but plain PyTorch
        backend = cuda_backend(name)
        if backend.name != name:
            report(name, "not installed")
            continue
        try:
            times, gaps = measure(backend, device)
        except Exception as error:  # of a package, such as one for another kind of GPU
            report(name, f"cannot do it: {error}"[:200])
            continue
        report(f"{name}_ms", times)
        report(f"{name}_errors", gaps)
        if all(gap < _TOLERANCE for gap in gaps):  # also false for NaN
            means[name] = math.prod(times.values())
    fastest = min(means, key=lambda name: means[name])
    report("fastest", fastest)
    remember_backend(torch.cuda.get_device_name(), fastest)


def measure(
    backend: AttentionBackend, device: torch.device
) -> tuple[dict[str, float], list[float]]:
    """Milliseconds of each shape, and the largest errors."""
    times, gaps = {}, []
    for shape, (lengths, nodes, chains) in SHAPES.items():
        counts = [nodes] * len(lengths)
        case = make_case(device, lengths, counts, (32, 8), 128, torch.bfloat16, paged=True)
        if chains:
            blocks = [replace(segment, parents=None) for segment in case.plan.segments]
            case = replace(case, plan=plan_trees(blocks, device=device))
        out = torch.full_like(case.q, torch.nan)
        call = AttentionCall(
            case.q, case.keys, case.values, case.plan, case.scale, window=None, out=out
        )
        times[shape] = median_ms(partial(backend.attend, call), device)
        gaps.append(float((out.double() - expected(case, torch.float64)).abs().max()))
    return times, gaps


if __name__ == "__main__":
    main()
