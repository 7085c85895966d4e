"""Tree attention against the float64 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import (
    Case,
    ProgramBackend,
    attend,
    cases,
    compiled,
    in_tiles,
    make_case,
)

from paceline.kernels import plan_trees, tree_attention
from paceline.kernels._compile import levels_here

pytestmark = pytest.mark.usefixtures("cpu_backend")


@settings(max_examples=40)
@given(case=cases(max_nodes=40))
def test_any_tree_agrees_with_the_reference(case: Case) -> None:
    torch.testing.assert_close(case.run().double(), case.expected()[0], atol=2e-5, rtol=1e-5)


@settings(max_examples=15)
@given(case=cases(max_nodes=40, dtypes=[torch.bfloat16]))
def test_tiles_agree_with_the_reference(case: Case) -> None:
    """Scaled queries are rounded in the reference too; the rest is the rounding of weights."""
    library = compiled(levels_here()[0]).library
    assert library is not None
    with in_tiles(library):
        found = case.run_by(ProgramBackend(library))
    scaled = replace(case, q=(case.q.float() * case.scale).bfloat16().double() / case.scale)
    torch.testing.assert_close(found.double(), scaled.expected()[0], atol=1.5e-2, rtol=0)


@pytest.mark.parametrize("window", [1, 3, 8])
def test_windows_that_lie_within_the_tree(window: int) -> None:
    """Deep nodes see nothing of the chunk in which the prefix ends."""
    parents = tuple(max(-1, node - 1 - node % 2) for node in range(120))
    case = make_case(7, 250, parents, window=window)
    torch.testing.assert_close(case.run().double(), case.expected()[0], atol=2e-5, rtol=1e-5)


def test_the_result_has_the_type_of_the_query() -> None:
    case = make_case(0, 20, (-1, 0), dtype=torch.bfloat16)
    plan = plan_trees([case.segment])
    out = tree_attention(case.q, [case.key], [case.value], plan, scale=case.scale)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, case.run().bfloat16())


def test_caches_may_be_strided_views() -> None:
    case = make_case(3, 300, (-1, 0, 0, 2))
    interleaved = torch.stack([case.key, case.value], dim=2)
    out = attend([case.segment], case.q, [interleaved[:, :, 0]], [interleaved[:, :, 1]], None)
    assert torch.equal(out, case.run())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 6, 64)}, "expected \\[2, heads"),
        ({"keys": []}, "give one each"),
        ({"keys": [torch.zeros(2, 3, 64)], "values": [torch.zeros(2, 3, 64)]}, "at least 22"),
        ({"keys": [torch.zeros(4, 30, 64)], "values": [torch.zeros(4, 30, 64)]}, "divisor"),
        ({"window": 0}, "window"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    case = make_case(0, 20, (-1, 0))
    arguments = {"q": case.q, "keys": [case.key], "values": [case.value], "window": None} | change
    with pytest.raises(ValueError, match=message):
        tree_attention(plan=plan_trees([case.segment]), scale=1.0, **arguments)  # type: ignore[call-overload]
