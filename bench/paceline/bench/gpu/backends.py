"""Compares the attention backends that are installed, and remembers the fastest.

Runs by itself too: ``python -m paceline.bench.gpu.backends cuda 0``. Later starts on the same kind
of GPU use what was measured here (``paceline.kernels.choice``).
"""

from __future__ import annotations

import torch

from paceline.bench.gpu.cases import expected, make_case
from paceline.bench.gpu.checking import arguments, finish, median_ms, report, require
from paceline.kernels.attention import cuda_backend
from paceline.kernels.choice import remember_backend

SHAPES = {"1 x 32k, 16 nodes": ([32768], 16), "8 x 8k, 1 node": ([8192] * 8, 1)}


def main() -> None:
    """The geometric mean over the shapes decides; who is wrong is out."""
    device, _ = arguments()
    if device.type == "cpu":
        report("skipped", "these backends are for NVIDIA GPUs")
        finish()
    scores: dict[str, float] = {}
    for name in ("triton", "flash_attn"):
        backend = cuda_backend(name)
        if backend.name != name:
            report(name, "not installed")
            continue
        times = {}
        for shape, (lengths, nodes) in SHAPES.items():
            case = make_case(
                device, lengths, [nodes] * len(lengths), (32, 8), 128, torch.bfloat16, paged=True
            )
            out = torch.full_like(case.q, torch.nan)

            def run(case=case, out=out, backend=backend) -> None:  # type: ignore[no-untyped-def]
                backend.attend(
                    case.q, case.keys, case.values, case.plan,
                    scale=case.scale, window=None, out=out, lse=None,
                )  # fmt: skip

            times[shape] = median_ms(run, device)
            gap = float((out.double() - expected(case, torch.float64)).abs().max())
            require(gap < 0.02, f"{name}, {shape}: off by {gap}")
            scores[name] = scores.get(name, 1.0) * times[shape]
            if not gap < 0.02:
                scores[name] = float("inf")
        report(f"{name}_ms", times)
    best = min(scores, key=lambda name: scores[name])
    report("fastest", best)
    remember_backend(torch.cuda.get_device_name(), best)
    finish()


if __name__ == "__main__":
    main()
