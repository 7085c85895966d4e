"""Attention in bfloat16 tiles, emulated where the processor has none."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    HEADS,
    PREFIXES,
    Case,
    ProgramBackend,
    compiled,
    in_tiles,
    make_case,
    trees,
)
from reference import reference_attention

from paceline.kernels import plan_trees
from paceline.kernels._compile import levels_here

CASES = {
    "parents": trees(most=40),
    "start": st.sampled_from(PREFIXES),
    "heads": st.sampled_from([*HEADS, (36, 2, 48)]),
    "window": st.sampled_from([None, None, 1, 40, 300]),
    "seed": st.integers(0, 1000),
}


def attended(case: Case, level: str, tiles: bool = True) -> torch.Tensor:
    library = compiled(level).library
    assert library is not None
    with in_tiles(library) if tiles else nullcontext():
        return case.run_by(ProgramBackend(library))


@settings(max_examples=40, deadline=None)
@given(**CASES)
def test_any_tree_agrees_with_the_reference(
    parents: tuple[int, ...],
    start: int,
    heads: tuple[int, int, int],
    window: int | None,
    seed: int,
) -> None:
    """Scaled queries are rounded in the reference too; the rest is the rounding of weights."""
    case = make_case(seed, start, parents, heads, torch.bfloat16, window)
    expected, _ = reference_attention(
        (case.q.float() * case.scale).bfloat16(), [case.key], [case.value],
        plan_trees([case.segment]), scale=1.0, window=window,
    )  # fmt: skip
    found = attended(case, levels_here()[0])
    torch.testing.assert_close(found.double(), expected, atol=1.5e-2, rtol=0)


@settings(max_examples=20, deadline=None)
@given(**CASES)
def test_emulated_tiles_have_the_same_bits_at_every_level(
    parents: tuple[int, ...],
    start: int,
    heads: tuple[int, int, int],
    window: int | None,
    seed: int,
) -> None:
    case = make_case(seed, start, parents, heads, torch.bfloat16, window)
    first, *others = (attended(case, level) for level in levels_here() if level != "amx")
    assert all(first.equal(other) for other in others)


@pytest.mark.parametrize("level", levels_here())
def test_float32_caches_are_not_rounded(level: str) -> None:
    case = make_case(5, 300, (-1, 0, 0, 1))
    assert attended(case, level).equal(attended(case, level, tiles=False))
