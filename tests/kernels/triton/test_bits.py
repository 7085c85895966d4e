"""A row of the Triton kernels has the bits of plain decoding: of one row behind its own path."""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Case, make_case, trees
from triton_cases import in_pages, run

from paceline.bench.gpu import decoder
from paceline.bench.gpu.cases import SMALL
from paceline.cuda.triton import tiles
from paceline.cuda.triton.plan import PassTables, Staging, TableShape
from paceline.cuda.triton.tiles import (
    Tiling,
    _any_work,
    _equal_work,
    chunk_begin,
    chunk_of,
    plan_work,
)
from paceline.kernels import EqualBlocks, LevelBlock, Probe, QueryBlock, plan_trees
from paceline.kernels.trees import ContextBlock

pytestmark = pytest.mark.usefixtures("products_of_a_gpu")

HEADS = [(2, 1, 16), (4, 2, 16), (7, 1, 16), (3, 3, 16), (20, 1, 16)]
BORDERS = [0, 1, 15, 16, 63, 64, 200, 250, 255, 256, 300, 511, 512, 700]
HALF = [torch.float16, torch.bfloat16]


def alone(case: Case, node: int, sinks: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Attention and log-sum-exp of a node, decoded as the only row behind its own path."""
    slots = [*range(case.block.start), *(case.block.start + n for n in case.path(node))]
    keys, values = [case.key[:, slots]], [case.value[:, slots]]
    block, q = QueryBlock(0, len(slots) - 1, None, 1), case.q[node : node + 1]
    return [each[0] for each in run([block], q, keys, values, case.window, sinks=sinks)]


def assert_bits(case: Case, found: Sequence[torch.Tensor], nodes: Sequence[int]) -> None:
    for node in nodes:
        for ours, plain in zip(found, alone(case, node), strict=True):
            assert torch.equal(ours[node], plain), f"node {node} of {case.block}"


@settings(max_examples=6)
@given(
    start=st.sampled_from(BORDERS),
    parents=trees(24) | trees(64),
    heads=st.sampled_from(HEADS),
    dtype=st.sampled_from([torch.float32, *HALF]),
    window=st.sampled_from([None, None, 1, 40, 300]),
    page=st.sampled_from([0, 16, 256]),
    seed=st.integers(0, 1000),
)
def test_any_node_of_any_tree(
    start: int, parents: tuple[int, ...], heads: tuple[int, int, int], dtype: torch.dtype,
    window: int | None, page: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    case = make_case(seed, start, parents, heads, dtype, window)
    planes = in_pages([case.key], [case.value], page) if page else ([case.key], [case.value])
    found = run([case.block], case.q, *planes, window)
    count = len(parents)
    assert_bits(case, found, sorted({0, count // 3, count // 2, count - 1}))


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 30), (torch.bfloat16, None)])
def test_rows_beside_others_in_chains_and_in_parts(dtype: torch.dtype, window: int | None) -> None:
    """Two cuts of a prompt over a border of a chunk, and a part of it beside another text."""
    case = make_case(1, 230, (-1, *range(39)), (2, 1, 16), dtype, window)
    other = make_case(2, 70, (-1, 0, 0, 2), (2, 1, 16), dtype, window)
    keys, values = [case.key, other.key], [case.value, other.value]
    found = run([case.block], case.q, keys, values, window)
    cut = [QueryBlock(0, *each) for each in ((230, None, 7), (237, None, 20), (257, None, 13))]
    again = run(cut, case.q, keys, values, window)
    beside = [QueryBlock(1, 70, other.block.parents, 4), QueryBlock(0, 250, None, 20)]
    q = torch.cat([other.q, case.q[20:]])
    for one, two, three in zip(
        found, again, run(beside, q, keys, values, window), strict=True
    ):  # fmt: skip
        assert torch.equal(one, two)
        assert torch.equal(one[20:], three[4:])
    assert_bits(case, found, [0, 25, 26, 39])


def test_sinks_and_recorded_scores_change_no_bit() -> None:
    case = make_case(3, 300, (-1, 0, 0, 1, 2, 4), (4, 2, 16), torch.float16)
    sinks = torch.linspace(-2, 8, 4)
    probes = [Probe(0, node, torch.empty(2, 300), node == 5) for node in (1, 4, 5)]
    found = run([case.block], case.q, [case.key], [case.value], None, probes, sinks=sinks)
    for node in (1, 4, 5):
        for ours, plain in zip(found, alone(case, node, sinks=sinks), strict=True):
            assert torch.equal(ours[node], plain)


def test_a_launch_in_parts_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of work whose partial results take too much memory at once."""
    half = torch.float16
    cases = [make_case(n, 260, (-1, 0, 0, *range(1, 10)), (4, 2, 16), half) for n in range(2)]
    blocks = [QueryBlock(n, 260, case.block.parents, 12) for n, case in enumerate(cases)]
    blocks.append(QueryBlock(1, 240, None, 20))
    q = torch.cat([*(case.q for case in cases), torch.randn(20, 4, 16).to(half)])
    planes = [case.key for case in cases], [case.value for case in cases]
    whole = run(blocks, q, *planes, None)
    monkeypatch.setattr(tiles, "PART_BYTES", 70 * tiles.part_row_bytes(2, 16))
    plan = plan_trees(blocks)
    work = plan_work(plan.blocks, Tiling.of(2, cases[0].key, None), tiles.part_row_bytes(2, 16))
    assert len(work.spans) >= 3
    for one, two in zip(whole, run(blocks, q, *planes, None), strict=True):
        assert torch.equal(one, two)


def test_borders_of_chunks_are_fixed_positions() -> None:
    assert [chunk_begin(n) for n in (0, 1, 15, 16, 17, 31, 32, 33)] == [
        0, 256, 3840, 4096, 4608, 11776, 12288, 13312
    ]  # fmt: skip
    for position in range(0, 20_000, 7):
        chunk = chunk_of(position)
        assert chunk_begin(chunk) <= position < chunk_begin(chunk + 1)
    assert all(chunk_begin(n) % 256 == 0 for n in range(200))


def test_more_work_than_a_graph_has_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "MAX_ITEMS", 8)
    tiling = Tiling.of(1, torch.empty(1, 16, 16), None)
    shape = TableShape.of(4, 4, [tiling], 4000, torch.empty(1, 16, 16))
    tables = PassTables(Staging(shape.tables, torch.device("cpu")), 0, shape)
    assert tables.fill([QueryBlock(0, 1000, None, 4)], [0])
    assert not tables.fill([QueryBlock(0, 3000, None, 4)], [0])


# The work of a draft's levels is found with arrays, and is that of each block


STARTS = (0, 1, 63, 255, 256, 700, 4096, 5000, 12288, 20_000)


@pytest.mark.parametrize("window", [None, 5, 512])
@pytest.mark.parametrize("levels", [(1,), (4, 16), (4, 16, 16, 16)])
@pytest.mark.parametrize("kind", ["level", "context"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_one_shape(
    kind: str, levels: tuple[int, ...], window: int | None, dtype: torch.dtype
) -> None:
    count = sum(levels)
    tiling = Tiling.of(4, torch.empty(2, 1, 64, dtype=dtype), window)
    first: QueryBlock = LevelBlock(0, STARTS[0], None, count, levels=levels)
    if kind == "context":
        first = ContextBlock(0, STARTS[0], None, count)
    blocks = EqualBlocks(first, np.array(STARTS))
    assert [(each.sequence, each.start) for each in blocks] == list(enumerate(STARTS))
    found, right = (each(blocks, tiling, 1 << 30) for each in (_equal_work, _any_work))
    assert found is not None
    assert found.part_rows == right.part_rows
    for mine, other in zip(found.arrays, right.arrays, strict=True):
        assert mine.dtype == other.dtype
        assert mine.tolist() == other.tolist()
    assert _equal_work(blocks, tiling, found.part_rows // 2) is None, "it takes several launches"


# The comparison of rows that `make gpu-first` makes on a GPU


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.usefixtures("triton_on_cpu", "products_of_a_gpu")
def test_rows_have_the_bits_of_plain_decoding(
    weights: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"ROWS": 6, "LEVELS": 5, "OTHERS": 4}.items():
        monkeypatch.setattr(decoder, name, value)
    config = replace(
        SMALL, layers=1, hidden=64, intermediate=96, q_heads=4, kv_heads=2, head_dim=32,
        vocab_size=50, windows=(None,), rope_inv_freq=tuple(0.3**i for i in range(16)),
    )  # fmt: skip
    config = replace(config, weights=weights)
    assert decoder.check(config, (300,), torch.device("cpu")) == 0
    *_, found = map(json.loads, capsys.readouterr().out.splitlines())
    cases = found[f"{weights}, rows that differ behind 300 tokens"]
    assert len(cases) == 9
    assert not any(cases.values()), cases
