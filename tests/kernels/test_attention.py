"""Tree attention against the float64 reference; probes leave no trace in the result."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    HEADS,
    LEVELS,
    OWN_NUMERICS,
    Case,
    ProgramBackend,
    attend,
    cases,
    compiled,
    make_case,
    trees,
)
from torch import Tensor

from paceline.kernels import Probe, QueryBlock, plan_trees, tree_attention

pytestmark = pytest.mark.usefixtures("cpu_backend")


@pytest.mark.parametrize("cpu_backend", ["generic", "reference"], indirect=True)
@settings(max_examples=16)
@given(case=cases(max_nodes=40))
def test_any_tree_agrees_with_the_reference(case: Case) -> None:
    """Plain C, whose bits all levels have (test_levels.py), and the reference."""
    torch.testing.assert_close(case.run().double(), case.expected()[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("cpu_backend", ["reference"], indirect=True)
@pytest.mark.parametrize("numerics", OWN_NUMERICS)
@settings(max_examples=8)
@given(case=cases(max_nodes=40, dtypes=[torch.bfloat16]))
def test_products_of_bfloat16_agree_with_the_reference(numerics: str, case: Case) -> None:
    """Scaled queries are rounded in the reference too; the rest is the rounding of weights."""
    found = case.run_by(ProgramBackend(compiled(LEVELS[0]), numerics))
    scaled = replace(case, q=(case.q.float() * case.scale).bfloat16().double() / case.scale)
    torch.testing.assert_close(found.double(), scaled.expected()[0], atol=1.5e-2, rtol=0)


def test_the_result_has_the_type_of_the_query() -> None:
    case = make_case(0, 20, (-1, 0), dtype=torch.bfloat16)
    plan = plan_trees([case.block])
    out = tree_attention(case.q, [case.key], [case.value], plan, scale=case.scale)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, case.run().bfloat16())


def test_caches_may_be_strided_views() -> None:
    case = make_case(3, 300, (-1, 0, 0, 2))
    interleaved = torch.stack([case.key, case.value], dim=2)
    out = attend([case.block], case.q, [interleaved[:, :, 0]], [interleaved[:, :, 1]], None)
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
        tree_attention(plan=plan_trees([case.block]), scale=1.0, **arguments)  # type: ignore[call-overload]


def expected(
    q: Tensor, key: Tensor, block: QueryBlock, row: int, probe: Probe, window: int | None
) -> Tensor:
    """``[Hkv, start]`` by the definition, in float64."""
    ancestors = torch.from_numpy(block.ancestors())[probe.node]
    at = block.start + block.depths[probe.node]
    where = torch.cat([torch.arange(block.start), block.start + torch.tensor(block.depths)])
    seen = torch.cat([torch.ones(block.start, dtype=torch.bool), ancestors])
    if window is not None:
        seen &= where > at - window
    heads = q[row].double().view(key.shape[0], -1, q.shape[2])
    scores = heads @ key[:, : block.stop].double().mT * q.shape[2] ** -0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) if probe.weights else scores)[..., : block.start].sum(1)


@settings(max_examples=16)
@given(
    shapes=st.lists(st.tuples(st.sampled_from([0, 1, 40, 256, 700]), trees(20)), max_size=3),
    heads=st.sampled_from(HEADS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.sampled_from([None, 1, 9, 300]),
    data=st.data(),
)
def test_noted_is_what_rows_look_at_and_the_result_has_the_same_bits(
    shapes: list[tuple[int, tuple[int, ...] | None]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    window: int | None,
    data: st.DataObject,
) -> None:
    """Batches of sequences, several probes each, of scores and of weights."""
    shapes = shapes or [(300, (-1, 0, 0))]
    hq, hkv, dim = heads
    blocks = [
        QueryBlock(index, start, parents, len(parents or (0,)))
        for index, (start, parents) in enumerate(shapes)
    ]
    plan = plan_trees(blocks)
    torch.manual_seed(0)
    q = torch.randn(plan.rows, hq, dim).to(dtype)
    keys = [torch.randn(hkv, s.stop, dim).to(dtype) for s in blocks]
    values = [torch.randn(hkv, s.stop, dim).to(dtype) for s in blocks]
    probes = []
    for index, block in enumerate(blocks):
        for node in data.draw(st.lists(st.integers(0, block.length - 1), max_size=12)):
            room = torch.full((hkv, block.start + 3), torch.nan)
            probes.append(Probe(index, node, room, data.draw(st.booleans())))
    scale = dim**-0.5
    plain = tree_attention(q, keys, values, plan, scale=scale, window=window)
    probed = tree_attention(q, keys, values, plan, scale=scale, window=window, probes=probes)
    assert probed.equal(plain)
    for probe in probes:
        block = blocks[probe.block]
        row = plan.offsets[probe.block] + probe.node
        right = expected(q, keys[probe.block], block, row, probe, window)
        probed = probe.out[:, : block.start].double()
        torch.testing.assert_close(probed, right, rtol=2e-3, atol=2e-3)
        assert probe.out[:, block.start :].isnan().all(), "nothing behind the prefix is written"


@pytest.mark.parametrize("weights", [False, True])
def test_a_plan_is_used_for_many_layers(weights: bool) -> None:
    """Other caches and other probes with the same plan."""
    plan = plan_trees([QueryBlock(0, 50, None, 4)])
    torch.manual_seed(0)
    for _ in range(3):
        q, key = torch.randn(4, 6, 64), torch.randn(2, 54, 64)
        probe = Probe(0, 3, torch.empty(2, 50), weights)
        tree_attention(q, [key], [key], plan, scale=0.125, probes=[probe])
        right = expected(q, key, plan.blocks[0], 3, probe, None)
        torch.testing.assert_close(probe.out.double(), right, rtol=1e-4, atol=1e-4)
