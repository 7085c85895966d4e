"""The Triton kernels against the float64 reference, contiguous and in pages."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import trees
from reference import reference_attention
from triton_cases import MILLION, check, draw_caches, in_far_pages, in_pages, run

from paceline.kernels import PagedPlane, Probe, QueryBlock, plan_trees
from paceline.kernels.attention import AttentionCall, record_scores
from paceline.kernels.caches import Plane

HEADS = [(2, 2, 64), (8, 2, 80), (7, 1, 96), (5, 1, 128), (1, 1, 256), (40, 1, 64)]


@settings(max_examples=6, phases=[Phase.generate])
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from([0, 1, 63, 65, 140]), trees(12)), min_size=1, max_size=2
    ),
    heads=st.sampled_from(HEADS),
    dtype=st.sampled_from([torch.float16, torch.float16, torch.float32]),
    window=st.sampled_from([None, None, 1, 40, 200]),
    page_size=st.sampled_from([0, 0, 1, 16, 64, 256]),
    seed=st.integers(0, 1000),
)
def test_any_batch_of_trees_agrees_with_the_reference(
    shapes: list[tuple[int, tuple[int, ...] | None]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    window: int | None,
    page_size: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    blocks = [
        QueryBlock(index, start, parents, len(parents or (0,) * 3))
        for index, (start, parents) in enumerate(shapes)
    ]
    q, keys, values = draw_caches(blocks, heads, dtype)
    key_planes: Sequence[Plane] = keys
    value_planes: Sequence[Plane] = values
    if page_size:
        key_planes, value_planes = in_pages(keys, values, page_size)
    found = run(blocks, q, key_planes, value_planes, window)
    expected = reference_attention(
        q, keys, values, plan_trees(blocks), scale=q.shape[2] ** -0.5, window=window
    )
    check(found, expected, dtype)


def test_the_largest_tree_over_many_chunks() -> None:
    torch.manual_seed(0)
    parents = tuple(max(-1, (node - 1) // 2) for node in range(256))
    blocks = [QueryBlock(0, 300, parents, 256), QueryBlock(1, 3, None, 1)]
    q, keys, values = draw_caches(blocks, (1, 1, 64), torch.float16)
    expected = reference_attention(q, keys, values, plan_trees(blocks), scale=0.125)
    check(run(blocks, q, keys, values, None), expected, torch.float16)


def test_sinks_are_scores_without_values() -> None:
    torch.manual_seed(0)
    blocks = [QueryBlock(0, 600, (-1, 0, 0), 3), QueryBlock(1, 0, None, 2)]
    q, keys, values = draw_caches(blocks, (6, 2, 64), torch.float16)
    sinks = torch.tensor([-50.0, 0.0, 1.0, 3.0, 8.0, 60.0])
    found = run(blocks, q, keys, values, None, sinks=sinks)
    attended, lse = reference_attention(q, keys, values, plan_trees(blocks), scale=0.125)
    expected = attended * (lse - sinks).sigmoid()[..., None], lse.logaddexp(sinks.double())
    check(found, expected, torch.float16)


def test_sparse_attention_is_attention_to_the_listed_slots() -> None:
    """Page size 1: selected positions of a prefix, then the new nodes, wherever they lie."""
    torch.manual_seed(0)
    chosen = torch.cat([torch.randperm(500)[:90].sort().values, torch.arange(500, 503)])
    pool = [torch.randn(503, 2, 1, 64).half() for _ in range(2)]
    tables = chosen.int()[None]
    planes = [PagedPlane(each, tables, 0, 93) for each in pool]
    q = torch.randn(3, 6, 64).half()
    blocks = [QueryBlock(0, 90, (-1, 0, 0), 3)]
    keys, values = ([plane.gather(torch.arange(93))] for plane in planes)
    assert keys[0].equal(pool[0][chosen, :, 0].transpose(0, 1))
    expected = reference_attention(q, keys, values, plan_trees(blocks), scale=0.125)
    check(run(blocks, q, planes[:1], planes[1:], None), expected, torch.float16)


@pytest.mark.parametrize(
    ("heads", "window"),
    [((6, 2, 64), None), ((4, 1, 64), 150), pytest.param((40, 1, 64), 150, marks=pytest.mark.slow)],
)
def test_noted_are_the_scores_and_the_result_has_the_same_bits(
    window: int | None, heads: tuple[int, int, int]
) -> None:
    """Of two rows of a block on the way, of a third and weights by another kernel; a second record
    of a row, and heads that no tile holds, by separate products."""
    torch.manual_seed(0)
    dtype = torch.float32 if heads[0] == 40 else torch.float16
    blocks = [
        QueryBlock(0, 270, (-1, 0, 0), 3), QueryBlock(1, 70, None, 1), QueryBlock(2, 65, None, 9)
    ]  # fmt: skip
    q, keys, values = draw_caches(blocks, heads, dtype)
    asked = [(0, 0, False), (0, 2, False), (0, 1, False), (1, 0, False), (1, 0, True)]
    asked += [(1, 0, True), (2, 0, True), (2, 8, True)]

    def make() -> list[Probe]:
        # What nothing is written to, as of the third block, is no number.
        rooms = [
            torch.full((heads[1], blocks[block].start + 3), torch.nan) for block, _, _ in asked
        ]
        return [
            Probe(block, node, room, weights)
            for (block, node, weights), room in zip(asked, rooms, strict=True)
        ]

    found, expected = make(), make()
    probed = run(blocks, q, keys, values, window, found)
    plain = run(blocks, q, keys, values, window)
    assert probed[0].equal(plain[0])
    assert probed[1].equal(plain[1])
    plan = plan_trees(blocks)
    call = AttentionCall(q, keys, values, plan, 0.125, window, *plain)
    record_scores(call, expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.out, theirs.out, atol=5e-3, rtol=5e-3, equal_nan=True)


def test_far_pages_and_positions_change_no_bit() -> None:
    """Of results, recorded scores and weights, with a window over two pages."""
    torch.manual_seed(0)
    start, kept, found = 300, [], []
    q, keys, values = draw_caches([QueryBlock(0, start, (-1, 0, 0), 3)], (2, 1, 64), torch.float16)
    for before in (MILLION // 8, MILLION):  # chunks of the same length begin at both
        planes = in_far_pages(keys, values, before, 1 << 31 if before == MILLION else 0)
        outs = [torch.empty(1, before + start) for _ in range(3)]
        probes = [Probe(0, node, out, weights=node == 1) for node, out in enumerate(outs)]
        blocks = [QueryBlock(0, before + start, (-1, 0, 0), 3)]
        found.append(run(blocks, q, *planes, 150, probes))
        kept.append(torch.stack(outs)[..., before:])
    assert found[0][0].equal(found[1][0])
    assert found[0][1].equal(found[1][1])
    assert kept[0].equal(kept[1])
    assert kept[0].isfinite().any(-1).all()


def test_caches_of_several_pools_are_refused() -> None:
    planes = [
        PagedPlane(torch.zeros(2, 1, 16, 64), torch.zeros(1, 2, dtype=torch.int32), 0, 32)
        for _ in range(2)
    ]
    blocks = [QueryBlock(index, 3, None, 1) for index in range(2)]
    with pytest.raises(ValueError, match="in one pool"):
        run(blocks, torch.zeros(2, 1, 64), planes, planes, None)


def test_heads_wider_than_shared_memory_are_refused() -> None:
    """For each type; the widest ones that fit every GPU are compiled in test_cross_compile.py."""
    blocks = [QueryBlock(0, 3, None, 1)]
    for dtype in (torch.float16, torch.float32):
        q, keys, values = draw_caches(blocks, (2, 1, 256), dtype)
        assert run(blocks, q, keys, values, None)[0].isfinite().all()
        q, keys, values = draw_caches(blocks, (2, 1, 264), dtype)
        with pytest.raises(ValueError, match="heads have 264 elements, expected at most 256"):
            run(blocks, q, keys, values, None)
