"""Compares the attention backends that are installed, and remembers the fastest.

`paceline.kernels.attention` uses the result at later starts on this kind of GPU. Runs by itself
too: ``python -m paceline.bench.gpu.backends cuda 0``.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from paceline.bench.gpu.cases import arguments, expected, make_case, median_ms, report
from paceline.kernels.attention import cuda_backend, remember_backend
from paceline.kernels.dense import AttentionCall

SHAPES = {"1 x 32k, 16 nodes": ([32768], 16), "8 x 8k, 1 node": ([8192] * 8, 1)}
_TOLERANCE = 0.02  # against float64


def main() -> None:
    """Choose by the geometric mean over the shapes; a backend with a wrong result is left out."""
    device = arguments()
    if device.type == "cpu":
        report("skipped", "these backends are for NVIDIA GPUs")
        return
    means: dict[str, float] = {}
    for name in ("triton", "flash_attn"):
        backend = cuda_backend(name)
        if backend.name != name:
            report(name, "not installed")
            continue
        times, gaps = {}, []
        for shape, (lengths, nodes) in SHAPES.items():
            counts = [nodes] * len(lengths)
            case = make_case(device, lengths, counts, (32, 8), 128, torch.bfloat16, paged=True)
            out = torch.full_like(case.q, torch.nan)
            call = AttentionCall(
                case.q, case.keys, case.values, case.plan, case.scale, window=None, out=out
            )
            attend = partial(backend.attend, call)
            times[shape] = median_ms(attend, device)
            gaps.append(float((out.double() - expected(case, torch.float64)).abs().max()))
        report(f"{name}_ms", times)
        report(f"{name}_errors", gaps)
        if all(gap < _TOLERANCE for gap in gaps):  # also false for NaN
            means[name] = math.prod(times.values())
    fastest = min(means, key=lambda name: means[name])
    report("fastest", fastest)
    remember_backend(torch.cuda.get_device_name(), fastest)


if __name__ == "__main__":
    main()
