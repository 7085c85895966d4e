"""Row kernels against the same in torch, and the KV they write into pages."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.bench.gpu.cases import make_case
from paceline.bench.gpu.checking import arguments, finish, report, require
from paceline.kernels import Norm, TreePlan, row_kernels
from paceline.kernels.paged import Plane, span
from paceline.kernels.rows import RowKernels, TorchRows


def turn(
    rows: RowKernels, heads: Tensor, plan: TreePlan, planes: list[list[Plane]], dim: int
) -> list[Tensor]:
    """Queries, then keys and values of every block as they were written."""
    table = torch.linspace(-1, 1, 8192 * dim, device=heads.device).view(8192, dim)
    norm = Norm(torch.linspace(0.5, 1.5, dim, device=heads.device), 1e-6)
    plan.prepared.clear()
    out = [rows.turn(heads, (norm, norm), table, plan, *planes)]
    return out + [
        span(each[segment.sequence], segment.start, segment.stop).float()
        for each in planes
        for segment in plan.segments
    ]


def main() -> None:
    """Compare over odd widths and both kinds of caches."""
    device, _ = arguments()
    ours, theirs = row_kernels(device), TorchRows()
    report("kernels", type(ours).__name__)
    worst = 0.0
    for width in (64, 320, 4096, 5120):
        x = torch.randn(37, width, device=device)
        delta = torch.randn(37, width, device=device).bfloat16()
        norm = Norm(torch.randn(width, device=device), 1e-5)
        found = ours.add_norm(x.clone(), delta, norm, torch.float32)
        expected = theirs.add_norm(x.clone(), delta, norm, torch.float32)
        worst = max(worst, float((found - expected).abs().max()))
        both = torch.randn(5, 2 * width, device=device).bfloat16()
        gap = (ours.gate(both).float() - theirs.gate(both).float()).abs()
        require(bool((gap <= 0.01 * (1 + theirs.gate(both).float().abs())).all()), "gates differ")
    require(worst < 1e-4, f"norms differ by {worst}")
    report("norm_error", worst)
    for paged in (False, True):
        for dim in (64, 80, 128):
            case = make_case(
                device, [0, 300, 2047], [5, 64, 1], (8, 2), dim, torch.float32, paged=paged
            )
            heads = torch.randn(case.plan.rows, 12 * dim, device=device)
            planes = [list(case.keys), list(case.values)]
            right = turn(theirs, heads, case.plan, planes, dim)
            wrong = 0.0
            for one, other in zip(turn(ours, heads, case.plan, planes, dim), right, strict=True):
                wrong = max(wrong, float((one - other).abs().max()))
            require(wrong < 1e-4, f"rotation with heads of {dim} differs by {wrong}")
    finish()


if __name__ == "__main__":
    main()
