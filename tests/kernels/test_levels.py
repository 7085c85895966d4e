"""Every level gives the bits of plain C, and inner loops of products hardly use the stack."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    HEADS,
    PREFIXES,
    Case,
    ProgramBackend,
    ProgramRows,
    compiled,
    make_case,
    trees,
)
from torch import Tensor

from paceline.kernels import Norm, TreeSegment, plan_trees
from paceline.kernels._compile import levels_here
from paceline.kernels.caches import row_width

PRODUCT = re.compile(r"vfmadd|vpdpbusd|vpmaddwd")
STACK = re.compile(r"\(%rsp|-0x\w+\(%rbp")
FAST = [level for level in levels_here() if level != "generic"]
pytestmark = pytest.mark.skipif(not FAST, reason="this processor has no level but plain C")


@pytest.fixture(params=FAST, scope="module")
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def attention_at(level: str, case: Case) -> Tensor:
    library = compiled(level).library
    assert library is not None
    return case.run_by(ProgramBackend(library))


@settings(max_examples=40, deadline=None)
@given(
    parents=trees(),
    start=st.sampled_from(PREFIXES),
    heads=st.sampled_from(HEADS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    window=st.sampled_from([None, None, 1, 40, 300]),
    seed=st.integers(0, 1000),
)
def test_attention_has_the_bits_of_plain_c(
    level: str,
    parents: tuple[int, ...],
    start: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    window: int | None,
    seed: int,
) -> None:
    case = make_case(seed, start, parents, heads, dtype, window)
    assert torch.equal(attention_at(level, case), attention_at("generic", case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_operations_have_the_bits_of_plain_c(level: str, dtype: torch.dtype) -> None:
    plan = plan_trees([TreeSegment(0, 5, (-1, 0, 0, 1), 4)])
    generator = torch.Generator().manual_seed(0)
    x, delta, weight = (torch.randn(n, 96, generator=generator) for n in (4, 4, 1))
    gates = torch.randn(4, 192, generator=generator).mul_(30).to(dtype)
    gates[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -88.5])
    heads = torch.randn(4, 5 * 96, generator=generator).to(dtype)
    table = torch.randn(12, 96, generator=generator)
    results = []
    for name in (level, "generic"):
        library = compiled(name).library
        assert library is not None
        rows = ProgramRows(library)
        norm = Norm(weight[0], 1e-5)
        caches = [
            torch.zeros(1, 9, row_width(96, each), dtype=each)
            for each in (dtype, dtype, torch.int8, torch.int8)
        ]
        plan.prepared.clear()
        q = rows.rotate(heads, (norm, norm), table, plan, caches[:1], caches[1:2])
        plan.prepared.clear()
        rows.rotate(heads, (norm, norm), table, plan, caches[2:3], caches[3:])
        normed, gated = rows.add_norm(x.clone(), delta, norm, dtype), rows.gate(gates)
        results.append((normed, gated, q, *caches))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_inner_loops_of_products_hardly_use_the_stack(level: str) -> None:
    """Vectors that go through memory for every few products cost more than the arithmetic."""
    if shutil.which("objdump") is None:
        pytest.skip("no objdump")
    library = compiled(level).library
    assert library is not None
    listing = subprocess.run(
        ["objdump", "--disassemble", "--no-show-raw-insn", library._name],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    loops = [loop for body in functions(listing) for loop in inner_loops(body)]
    busy = [loop for loop in loops if sum(bool(PRODUCT.search(line)) for line in loop) >= 8]
    # Scores; weighted values, in float32 and bfloat16; exponentials; linear layers in four formats.
    assert len(busy) >= 9
    for loop in busy:
        products = sum(bool(PRODUCT.search(line)) for line in loop)
        spilled = [line for line in loop if re.search(r"[xyz]mm", line) and STACK.search(line)]
        assert len(spilled) <= products / 8, "\n".join(loop)


def functions(listing: str) -> Iterator[list[tuple[int, str]]]:
    """Every function's instructions with their addresses."""
    for part in re.split(r"\n(?=[0-9a-f]+ <)", listing):
        lines = re.findall(r"^ *([0-9a-f]+):\t(.*)$", part, re.MULTILINE)
        if lines:
            yield [(int(at, 16), text) for at, text in lines]


def inner_loops(body: list[tuple[int, str]]) -> list[list[str]]:
    """Instructions between a backward jump and its target that hold no other such pair."""
    spans = []
    for at, text in body:
        jump = re.match(r"j(?!mp)\w+ +([0-9a-f]+)", text)  # jmp: back from code moved out of line
        if jump and body[0][0] <= (target := int(jump[1], 16)) < at:
            spans.append((target, at))
    inner = [
        (low, high)
        for low, high in spans
        if not any((a, b) != (low, high) and low <= a and b <= high for a, b in spans)
    ]
    loops = [[text for at, text in body if low <= at <= high] for low, high in inner]
    return [loop for loop in loops if "ret" not in loop]  # code moved behind the function's end
