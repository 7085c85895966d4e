"""Batch invariance: a row has the same bits in any batch, at every level."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, HEADS, Case, attend, cases, make_case, trees

from paceline.kernels import Probe, QueryBlock, plan_trees, tree_attention

pytestmark = pytest.mark.usefixtures("native_backend")


def assert_every_path_alone(case: Case, nodes: list[int]) -> None:
    out = case.run()
    for node in nodes:
        assert torch.equal(case.run_alone(node)[0], out[node]), f"node {node} of {case.block}"


@settings(max_examples=60)
@given(case=cases())
def test_any_node_of_any_tree_has_the_bits_of_its_path_alone(case: Case) -> None:
    count = case.block.length
    assert_every_path_alone(case, sorted({0, count // 3, count // 2, count - 1}))


# Every type of the cache and every shape of heads; any tree is tried with all their pairs.
@pytest.mark.parametrize(("heads", "dtype"), [*zip(HEADS, cycle(DTYPES))])
def test_the_largest_tree_over_a_border(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    parents = tuple(max(-1, i - 1 - i % 3) for i in range(256))
    case = make_case(1, 450, parents, heads, dtype)
    assert_every_path_alone(case, [0, 61, 100, 200, 254, 255])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 256, 512, 2048])
def test_prefill_blocks_have_the_bits_of_decoding(start: int, dtype: torch.dtype) -> None:
    case = make_case(2, start, (-1, *range(255)), dtype=dtype)
    assert_every_path_alone(case, [0, 1, 3, 4, 15, 16, 100, 254, 255])


@settings(max_examples=12)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from([200, 1000, 3000]), trees(50)), min_size=1, max_size=3
    ),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([None, 300]),
    seed=st.integers(0, 1000),
)
def test_threads_do_not_change_bits(
    shapes: list[tuple[int, tuple[int, ...]]], dtype: torch.dtype, window: int | None, seed: int
) -> None:
    """Chunks of few rows are divided among threads, also those of rows with probes."""
    cases = [make_case(seed, start, parents, HEADS[0], dtype) for start, parents in shapes]
    blocks = [
        QueryBlock(index, case.block.start, case.block.parents, case.block.length)
        for index, case in enumerate(cases)
    ]
    q, plan = torch.cat([case.q for case in cases]), plan_trees(blocks)
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            outs = [torch.zeros(2, block.start) for block in blocks]
            probes = [Probe(index, 0, out, weights=True) for index, out in enumerate(outs)]
            out = tree_attention(
                q, [case.key for case in cases], [case.value for case in cases], plan,
                scale=cases[0].scale, window=window, out=torch.empty(q.shape), probes=probes,
            )  # fmt: skip
            results.append([out, *outs])
    finally:
        torch.set_num_threads(threads)
    for others in results[1:]:
        assert all(a.equal(b) for a, b in zip(results[0], others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_one_sequence_in_one_plan_have_the_bits_of_separate_plans(
    dtype: torch.dtype,
) -> None:
    case = make_case(3, 200, (-1, *range(199)), dtype=dtype)
    blocks = [QueryBlock(0, 200, None, 56), QueryBlock(0, 256, None, 144)]
    out = attend(blocks, case.q, [case.key], [case.value], None)
    assert torch.equal(out, case.run())
