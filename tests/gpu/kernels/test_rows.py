"""Row kernels against PyTorch, and the KV they write into caches."""

import pytest
import torch
from attention_cases import Case, make_case
from torch import Tensor

from paceline.bench.reference import ReferenceRows
from paceline.kernels import Norm, kernels_for
from paceline.kernels.caches import span
from paceline.kernels.rotated import DOWN_SIZE, RotatedMatrix, quantise_rows
from paceline.kernels.rows import RowKernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("width", [64, 320, 4096, 5120])
def test_norms_and_gates(device: torch.device, width: int) -> None:
    ours, plain = kernels_for(device).rows, ReferenceRows()
    x = torch.randn(37, width, device=device)
    delta = torch.randn(37, width, device=device).bfloat16()
    norm = Norm(torch.randn(width, device=device), 1e-5)
    found, right = (rows.add_norm(x.clone(), delta, norm, torch.float32) for rows in (ours, plain))
    torch.testing.assert_close(found, right, atol=1e-4, rtol=0)
    both = torch.randn(5, 2 * width, device=device).bfloat16()
    torch.testing.assert_close(ours.gate(both), plain.gate(both), atol=0.01, rtol=0.01)


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize(("ins", "outs"), [(4096, 6144), (14336, 4096), (11008, 50), (320, 48)])
def test_products_of_8_bit_integers(device: torch.device, ins: int, outs: int, rows: int) -> None:
    """Bit by bit those of the CPU, of weights that each has quantised."""
    x = torch.randn(rows, ins, device=device).bfloat16()
    x[0, :3] *= 1e4
    bias = torch.randn(outs, device=device)
    weight = torch.randn(outs, ins, device=device).bfloat16()
    matrix, plain = (RotatedMatrix.of(each, DOWN_SIZE) for each in (weight, weight.cpu()))
    assert torch.equal(matrix.values.cpu(), plain.values)
    assert torch.equal(matrix.scale.cpu(), plain.scale)
    for each, expected in zip(
        quantise_rows(x, matrix.size), quantise_rows(x.cpu(), matrix.size), strict=True
    ):
        assert torch.equal(each.cpu(), expected)
    found = matrix.multiply(x, bias)
    assert torch.equal(found.cpu(), plain.multiply(x.cpu(), bias.cpu()))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_rotation_and_kv_writes(device: torch.device, dim: int, paged: bool) -> None:
    case = make_case(device, [0, 300, 2047], [5, 64, 1], (8, 2), dim, torch.float32, paged=paged)
    heads = torch.randn(case.plan.rows, 12 * dim, device=device)
    right = turned(ReferenceRows(), heads, case, dim)
    for found, expected in zip(
        turned(kernels_for(device).rows, heads, case, dim), right, strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def turned(rows: RowKernels, heads: Tensor, case: Case, dim: int) -> list[Tensor]:
    """Queries, then the keys and values of every block as they were written."""
    table = torch.linspace(-1, 1, 8192 * dim, device=heads.device).view(8192, dim)
    norm = Norm(torch.linspace(0.5, 1.5, dim, device=heads.device), 1e-6)
    case.plan.torch.factors.clear()
    queries = rows.rotate(heads, (norm, norm), table, case.plan, case.keys, case.values)
    return [queries] + [
        span(planes[block.sequence], block.start, block.stop).clone()
        for planes in (case.keys, case.values)
        for block in case.plan.blocks
    ]
