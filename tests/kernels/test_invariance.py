"""Batch invariance: a row has the same bits in any batch, at every level."""

import os
import random
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    BACKENDS,
    DTYPES,
    HEADS,
    WINDOWED,
    Case,
    attend,
    cases,
    make_case,
    trees,
    use_threads,
    windowed_case,
)

from paceline.kernels import CHUNK, MAX_TREE_NODES, Probe, QueryBlock, plan_trees, tree_attention
from paceline.kernels._compile import SANITIZERS

pytestmark = pytest.mark.usefixtures("native_backend")


@settings(max_examples=10)
@given(
    case=cases(max_nodes=MAX_TREE_NODES),
    texts=st.sampled_from([1, 1, 3]),
    threads=st.integers(1, 2),
)
def test_any_node_of_any_tree_has_the_bits_of_its_path_alone(
    case: Case, texts: int, threads: int
) -> None:
    count = case.block.length
    case.assert_alone(sorted({0, count // 3, count // 2, count - 1}), texts, threads)


def assert_columns(name: str, columns: Iterable[int], max_nodes: int) -> None:
    """Check trees whose windows begin at these columns of a chunk, of one text or several, on one
    thread or two."""
    for column in columns:
        case = windowed_case(name, column, seed=column, max_nodes=max_nodes)
        count = case.block.length
        nodes = {0, 1, count - 1, *random.Random(column).choices(range(count), k=3)}
        texts, threads = ((1, 1), (3, 1), (1, 2))[column % 3]
        case.assert_alone(sorted(nodes), texts, threads)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_may_begin_anywhere(request: pytest.FixtureRequest, name: str) -> None:
    """The rows of a tile see different parts of its first chunk, some none of it.

    All columns at the fastest level for one model, else a border and some other one.
    """
    every = request.node.callspec.params["native_backend"] == BACKENDS[0] and "270M" in name
    columns = [255, random.Random(request.node.name).randrange(200, 255)]
    if every:
        columns = range(0, CHUNK, 15 if os.environ.get(SANITIZERS) else 1)
    assert_columns(name, columns, MAX_TREE_NODES if every else 2**15 // WINDOWED[name][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_may_begin_anywhere_at_every_level(name: str) -> None:
    assert_columns(name, [0, 1, 239, 254], MAX_TREE_NODES)


@settings(max_examples=6)
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
    results = []
    for count in (1, 2, 5):
        outs = [torch.zeros(2, block.start) for block in blocks]
        probes = [Probe(index, 0, out, weights=True) for index, out in enumerate(outs)]
        with use_threads(count):
            out = tree_attention(
                q, [case.key for case in cases], [case.value for case in cases], plan,
                scale=cases[0].scale, window=window, out=torch.empty(q.shape), probes=probes,
            )  # fmt: skip
        results.append([out, *outs])
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
