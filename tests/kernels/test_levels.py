"""Every level gives the bits of plain C."""

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import (
    LEVELS,
    OWN_NUMERICS,
    Case,
    ProgramBackend,
    ProgramRows,
    cases,
    compiled,
    usually,
)
from torch import Tensor

from paceline.bench.reference import ReferenceKernels
from paceline.kernels import Norm, QueryBlock, plan_trees
from paceline.kernels.caches import row_width

FAST = [level for level in LEVELS if level != "generic"]
pytestmark = pytest.mark.skipif(not FAST, reason="this processor has no level but plain C")


@pytest.fixture(params=map(usually, FAST), scope="module")
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def attention_at(
    level: str,
    case: Case,
    numerics: str = "portable",
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    return case.run_by(ProgramBackend(compiled(level), numerics), cap, sinks)


@settings(max_examples=5)
@given(case=cases())
def test_attention_has_the_bits_of_plain_c(level: str, case: Case) -> None:
    assert torch.equal(attention_at(level, case), attention_at("generic", case))
    capped = attention_at(level, case, cap=1.5)
    assert torch.equal(capped, attention_at("generic", case, cap=1.5))
    torch.testing.assert_close(capped, case.run_by(ReferenceKernels(), 1.5), rtol=0, atol=2e-2)
    sinks = torch.linspace(-3, 9, case.q.shape[1])
    found = attention_at(level, case, sinks=sinks)
    assert torch.equal(found, attention_at("generic", case, sinks=sinks))
    expected = case.run_by(ReferenceKernels(), sinks=sinks)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("numerics", OWN_NUMERICS)
@settings(max_examples=5)
@given(case=cases())
def test_products_of_bfloat16_have_the_bits_of_emulated_ones(
    level: str, numerics: str, case: Case
) -> None:
    """Caches of other types are not rounded for them."""
    found = attention_at(level, case, numerics)
    if case.key.dtype is not torch.bfloat16:
        assert torch.equal(found, attention_at(level, case))
    elif (level, numerics) != ("amx", "amx"):  # tiles sum in an order of their own
        assert torch.equal(found, attention_at("generic", case, numerics))


def test_the_dot_product_of_bfloat16_is_that_of_plain_c(level: str) -> None:
    assert compiled(level).paceline_dot_check() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_operations_have_the_bits_of_plain_c(level: str, dtype: torch.dtype) -> None:
    plan = plan_trees([QueryBlock(0, 5, (-1, 0, 0, 1), 4)])
    generator = torch.Generator().manual_seed(0)
    x, delta, weight = (torch.randn(n, 96, generator=generator) for n in (4, 4, 1))
    gates = torch.randn(4, 192, generator=generator).mul_(30).to(dtype)
    gates[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -88.5])
    heads = torch.randn(4, 5 * 96, generator=generator).to(dtype)
    table = torch.randn(12, 96, generator=generator)
    results = []
    for name in (level, "generic"):
        rows = ProgramRows(compiled(name))
        norm = Norm(weight[0], 1e-5)
        caches = [
            torch.zeros(1, 9, row_width(96, each), dtype=each)
            for each in (dtype, dtype, torch.int8, torch.int8)
        ]
        plan.native.clear()
        q = rows.rotate(heads, (norm, norm), table, plan, caches[:1], caches[1:2])
        plan.native.clear()
        rows.rotate(heads, (norm, norm), table, plan, caches[2:3], caches[3:])
        plan.native.clear()
        whole = (Norm(weight[0].repeat(3), 1e-5), norm)  # of all queries, of all keys
        together = rows.rotate(heads, whole, table, plan, caches[:1], caches[1:2])
        normed, gated = rows.add_norm(x.clone(), delta, norm, dtype), rows.gate(gates)
        results.append((normed, gated, rows.gate(gates, gelu=True), together, q, *caches))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
