"""Row kernels: the compiled ones and the reference, and independence of rows."""

import pytest
import torch
from kernel_cases import ProgramRows
from torch import Tensor

from paceline.bench.reference import ReferenceRows
from paceline.kernels import Norm, QueryBlock, plan_trees
from paceline.kernels._native import library
from paceline.kernels.rows import RowKernels, convolve_blocks

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["native", "reference"])
def rows(request: pytest.FixtureRequest) -> RowKernels:
    return ReferenceRows() if request.param == "reference" else ProgramRows(library())


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """One rounding of the type."""
    return {"rtol": 2**-7 if dtype == torch.bfloat16 else 2e-6, "atol": 1e-6}


@pytest.mark.parametrize("width", [64, 384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm(rows: RowKernels, width: int, dtype: torch.dtype) -> None:
    x, delta = draw(7, width), draw(7, width, dtype=dtype, seed=1)
    norm = Norm(draw(width, seed=2), 1e-5)
    total = x.double() + delta.double()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    changed = x.clone()
    found = rows.add_norm(changed, delta, norm, dtype)
    torch.testing.assert_close(changed.double(), total, rtol=1e-6, atol=1e-6)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, **tolerance(dtype))
    alone = rows.add_norm(x[3:4].clone(), delta[3:4], norm, dtype)
    assert torch.equal(alone[0], found[3])


@pytest.mark.parametrize("width", [32, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(rows: RowKernels, width: int, dtype: torch.dtype) -> None:
    both = draw(5, 2 * width, dtype=dtype) * 30  # far tails too
    both[0, :4] = torch.tensor([-500.0, 500.0, -89.0, 0.0])
    gate, up = both.double().chunk(2, dim=-1)
    found = rows.gate(both)
    torch.testing.assert_close(
        found.double(), torch.nn.functional.silu(gate) * up, **tolerance(dtype)
    )
    assert torch.equal(rows.gate(both[2:3])[0], found[2])


@pytest.mark.parametrize("dim", [16, 64, 80, 96])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_turn(rows: RowKernels, dim: int, dtype: torch.dtype, normed: bool) -> None:
    blocks = [QueryBlock(1, 5, (-1, 0, 0, 1), 4), QueryBlock(0, 0, None, 3)]
    plan = plan_trees(blocks)
    heads = draw(plan.rows, (6 + 2 * 2) * dim, dtype=dtype)
    angles = torch.arange(40)[:, None] * torch.rand(dim // 2)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    norms = (Norm(draw(dim, seed=3), 1e-6), Norm(draw(dim, seed=4), 1e-6)) if normed else None
    keys, values = ([torch.full((2, n, dim), 9.0, dtype=dtype) for n in (3, 20)] for _ in range(2))
    q = rows.rotate(heads, norms, table, plan, keys, values)

    parts = heads.double().view(plan.rows, 10, dim).split((6, 2, 2), dim=1)
    for part, norm, seen in zip(parts[:2], norms or (None, None), (q, None), strict=True):
        if norm is not None:
            part = part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
        a, b = part.chunk(2, -1)
        cos, sin = table[plan.positions].double()[:, None].chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        if seen is not None:
            torch.testing.assert_close(seen.double(), turned, rtol=1e-5, atol=1e-5)
        else:
            found = torch.cat([keys[1][:, 5:9], keys[0][:, :3]], 1).transpose(0, 1)
            bound = tolerance(dtype) | {"atol": 1e-5}
            torch.testing.assert_close(found.double(), turned, **bound)
    written = torch.cat([values[1][:, 5:9], values[0][:, :3]], 1).transpose(0, 1)
    assert torch.equal(written, parts[2].to(dtype))
    for cache in (keys[1], values[1]):
        assert (cache[:, :5] == 9).all()
        assert (cache[:, 9:] == 9).all()


@pytest.mark.parametrize(("width", "groups", "size"), [(64, 4, 2), (96, 96, 3), (48, 8, 1)])
@pytest.mark.parametrize("which", [0, 1])
def test_convolve(width: int, groups: int, size: int, which: int) -> None:
    """Each row with those before it in its block, and no other."""
    x, base, own = (
        draw(3 * 5, width),
        draw(size, width, seed=1),
        draw(15, 2 * size * groups, seed=2),
    )
    blocks = x.unflatten(0, (3, 5)), base, own.unflatten(0, (3, 5)), which
    found = ProgramRows(library()).convolve(x, base, own, which, 5)
    torch.testing.assert_close(found, convolve_blocks(*blocks).flatten(0, 1))


def test_parts_of_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="40 elements, expected multiples of 16"):
        ProgramRows(library()).gate(draw(1, 80))
