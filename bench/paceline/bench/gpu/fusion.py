"""Fused norms, rotation and activation against PyTorch, ``torch.compile`` and Liger."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from paceline.bench.gpu.cases import make_case
from paceline.bench.gpu.timing import arguments, graphed, median_ms, report
from paceline.kernels import Norm, row_kernels
from paceline.kernels.rows import RowKernels, TorchRows

WIDTH, WIDE, HEADS, KV_HEADS, DIM = 4096, 14336, 32, 8, 128
"""Of an 8B model."""

Step = Callable[[], object]


def own_steps(rows: RowKernels, count: int, device: torch.device) -> dict[str, Step]:
    """One layer's operations over `count` rows, as the decoder calls them."""
    x = torch.randn(count, WIDTH, device=device)
    delta = torch.randn(count, WIDTH, device=device).bfloat16()
    norm = Norm(torch.ones(WIDTH, device=device), 1e-5)
    both = torch.randn(count, 2 * WIDE, device=device).bfloat16()
    case = make_case(device, [1000], [count], (HEADS, KV_HEADS), DIM, torch.bfloat16, paged=True)
    heads = torch.randn(count, (HEADS + 2 * KV_HEADS) * DIM, device=device).bfloat16()
    table = torch.randn(2048, DIM, device=device)
    return {
        "add_norm": lambda: rows.add_norm(x, delta, norm, torch.bfloat16),
        "gate": lambda: rows.gate(both),
        "rotate": lambda: rows.rotate(heads, None, table, case.plan, case.keys, case.values),
    }


def compiled_steps(count: int, device: torch.device) -> dict[str, Step]:
    """The first two by ``torch.compile``, which cannot fuse the third: it writes into pages."""
    x = torch.randn(count, WIDTH, device=device)
    delta = torch.randn(count, WIDTH, device=device).bfloat16()
    weight = torch.ones(WIDTH, device=device)
    both = torch.randn(count, 2 * WIDE, device=device).bfloat16()

    def add_norm(x: Tensor, delta: Tensor) -> Tensor:
        x.add_(delta)
        return rms_norm(x, (WIDTH,), weight, 1e-5).bfloat16()

    def gate(both: Tensor) -> Tensor:
        first, second = both.float().chunk(2, dim=-1)
        return (silu(first) * second).bfloat16()

    fast_norm, fast_gate = torch.compile(add_norm), torch.compile(gate)
    return {"add_norm": lambda: fast_norm(x, delta), "gate": lambda: fast_gate(both)}


def liger_steps(count: int, device: torch.device) -> dict[str, Step]:
    """Liger's norm adds no residual, so the sum is an operation before it."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    x = torch.randn(count, WIDTH, device=device)
    delta = torch.randn(count, WIDTH, device=device).bfloat16()
    weight = torch.ones(WIDTH, device=device)
    first, second = torch.randn(2, count, WIDE, device=device).bfloat16()

    def add_norm() -> Tensor:
        x.add_(delta)
        out: Tensor = LigerRMSNormFunction.apply(x, weight, 1e-5)
        return out.bfloat16()

    return {"add_norm": add_norm, "gate": lambda: LigerSiLUMulFunction.apply(first, second)}


def main() -> None:
    """Report replays of CUDA graphs, so that launches are not timed."""
    device = arguments()
    makers: dict[str, Callable[[int], dict[str, Step]]] = {
        "ours": lambda count: own_steps(row_kernels(device), count, device),
        "torch": lambda count: own_steps(TorchRows(), count, device),
        "torch_compile": lambda count: compiled_steps(count, device),
        "liger": lambda count: liger_steps(count, device),
    }
    if find_spec("liger_kernel") is None:
        report("liger_not_installed", True)
        del makers["liger"]
    if device.type == "cpu":
        del makers["torch_compile"]
    for count in (1, 64):
        found: dict[str, Any] = {}
        for name, make in makers.items():
            try:
                found[name] = {
                    step: 1e3 * median_ms(graphed(action, device), device)
                    for step, action in make(count).items()
                }
            except Exception as error:  # of another package, or without a compiler
                if name == "ours":
                    raise
                found[name] = f"cannot do it: {error}"[:200]
        report(f"microseconds, {count} rows", found)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
