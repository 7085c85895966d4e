"""Row kernels in Triton against the same in torch, whose caches they must fill alike."""

import pytest
import torch
from torch import Tensor
from triton_cases import MILLION, in_far_pages, in_pages

from paceline.bench.reference import ReferenceRows
from paceline.cuda.triton.backend import TritonRows
from paceline.cuda.triton.gather import NO_PLACE, RECORD, gather_kv, gather_states
from paceline.cuda.triton.products import multiply_by_experts, quantise_rotated, scaled_sums
from paceline.kernels import SINKS, Norm, QueryBlock, plan_trees, streaming
from paceline.kernels.rotated import IntSums, block_size, quantise_rows, scale_sums


def make_norm(width: int) -> Norm:
    return Norm(1 + 0.1 * torch.randn(width), 1e-5)


@pytest.mark.parametrize("delta_dtype", [None, torch.float16])
def test_norms_add_in_place_and_agree(delta_dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(3, 320), make_norm(320)
    delta = None if delta_dtype is None else torch.randn(3, 320).to(delta_dtype)
    ours, theirs = x.clone(), x.clone()
    found = TritonRows().add_norm(ours, delta, norm, torch.float16)
    expected = ReferenceRows().add_norm(theirs, delta, norm, torch.float16)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours, theirs)


def test_gates_agree() -> None:
    gate_up = torch.randn(3, 2 * 1100).half()
    torch.testing.assert_close(TritonRows().gate(gate_up), ReferenceRows().gate(gate_up))


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_integers_are_scaled_by_the_kernels_that_read_them(has_bias: bool) -> None:
    """Bit by bit as if they were scaled before."""
    torch.manual_seed(0)

    def product(width: int) -> IntSums:
        sums = torch.randint(-(10**6), 10**6, (9, width + 8)).int()  # padded on both sides
        bias = torch.randn(width) if has_bias else None
        return IntSums(sums, 1e-3 * torch.rand(5), 1e-3 * torch.rand(width), bias, torch.float32)

    rows = TritonRows()
    delta, x, norm = product(320), torch.randn(5, 320), make_norm(320)
    ours, theirs = x.clone(), x.clone()
    found = rows.add_norm(ours, delta, norm, torch.float32)
    assert torch.equal(found, rows.add_norm(theirs, delta.scaled(), norm, torch.float32))
    assert torch.equal(ours, theirs)
    gate_up = product(2 * 1100)
    assert torch.equal(rows.gate(gate_up), rows.gate(gate_up.scaled()))
    blocks = [QueryBlock(0, 3, None, 5)]
    heads, table = product(8 * 16), torch.randn(64, 16)
    norms = make_norm(16), make_norm(16)
    found_q, written = [], []
    for given in (heads, heads.scaled()):
        keys, values = ([torch.zeros(2, 8, 16)] for _ in range(2))
        found_q.append(rows.rotate(given, norms, table, plan_trees(blocks), keys, values))
        written.append(torch.stack([*keys, *values]))
    assert torch.equal(*found_q)
    assert torch.equal(*written)
    assert written[0].any()


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("has_norms", [False, True])
def test_queries_turn_and_keys_and_values_go_to_their_slots(
    page_size: int, has_norms: bool
) -> None:
    torch.manual_seed(1)
    q_heads, kv_heads, dim = 4, 2, 80
    blocks = [QueryBlock(0, 30, (-1, 0, 0), 3), QueryBlock(1, 0, None, 2)]
    plan = plan_trees(blocks)
    heads = torch.randn(6, (q_heads + 2 * kv_heads) * dim)  # a row more than is planned
    norms = (make_norm(dim), make_norm(dim)) if has_norms else None
    table = torch.randn(64, dim)
    outs, filled = [], []
    for rows in (TritonRows(), ReferenceRows()):
        empty = [torch.zeros(kv_heads, block.stop + 2, dim) for block in blocks]
        keys, values = empty, [each.clone() for each in empty]
        if page_size:
            torch.manual_seed(2)
            keys, values = in_pages(keys, values, page_size)
        outs.append(rows.rotate(heads, norms, table, plan_trees(blocks), keys, values))
        assert outs[-1].shape == (plan.rows, q_heads, dim)
        filled.append([
            each.gather(torch.arange(block.stop)) if page_size else each[:, : block.stop]
            for planes in (keys, values)
            for each, block in zip(planes, blocks, strict=True)
        ])  # fmt: skip
    torch.testing.assert_close(*outs)
    for found, expected in zip(*filled, strict=True):
        torch.testing.assert_close(found, expected)
        assert found.abs().sum()


def test_far_positions_are_written_to_far_pages() -> None:
    torch.manual_seed(1)
    heads, near, empty = (
        torch.randn(5, 4 * 64).half(),
        torch.randn(310, 64),
        torch.zeros(1, 310, 64),
    )
    far = torch.empty(MILLION + 310, 64)
    far[MILLION:] = near
    found = []
    for before, table, make in ((0, near, in_pages), (MILLION, far, in_far_pages)):
        where = (256,) if make is in_pages else (MILLION, 1 << 31)
        planes = make([empty.half()], [empty.half()], *where)
        plan = plan_trees([QueryBlock(0, before + 254, (-1, 0, 0, 1, 1), 5)])
        q = TritonRows().rotate(heads, None, table, plan, *planes)
        slots = torch.arange(before + 250, before + 262)
        found.append([q, *(plane.gather(slots) for (plane,) in planes)])
    for one, other in zip(*found, strict=True):
        assert one.equal(other)
        assert one.abs().sum()


# Rows in pages are gathered by tables of places alone


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_keys_and_values_of_texts_in_two_pools(dtype: torch.dtype) -> None:
    """With pages of several sizes, of texts shorter than the sinks, within a page and over many;
    one text has none. Slots behind a text stay as they are."""
    torch.manual_seed(0)
    layers, heads, dim, slots = 3, 2, 24, 80
    out = torch.full((5, 2, heads, slots, dim), 7.0, dtype=dtype)
    expected = out.clone()
    records = torch.zeros(5, RECORD, dtype=torch.int64)
    pages = torch.zeros(5, 9, dtype=torch.int32)
    source, pools = torch.zeros(4, dtype=dtype), []
    for text, (length, budget, size, layer) in enumerate(
        [(3, 64, 16, 0), (70, 80, 16, 2), (200, 60, 16, 1), (0, 64, 16, 0), (900, 66, 256, 1)]
    ):
        count = -(-max(1, length) // size)
        pool = torch.randn(count + 2, layers, 2, heads, size, dim).to(dtype)
        pools.append(pool)
        if not length:
            continue
        table = torch.randperm(count + 2)[:count]
        ranges = streaming(length, budget)
        positions = torch.tensor([at for each in ranges for at in each])
        first = ranges[1].start if len(ranges) > 1 else SINKS
        item = pool.element_size()
        place = (pool[0, layer].data_ptr() - source.data_ptr()) // item
        records[text] = torch.tensor([place, pool.stride(0), size, len(positions), first])
        listed = torch.cat([table[:1], table[first // size : -(-length // size)]])
        pages[text, : len(listed)] = listed
        rows = pool[table[positions // size], layer, :, :, positions % size]
        expected[text, :, :, : len(positions)] = rows.permute(1, 2, 0, 3)
    gather_kv(source, records, pages, out)
    assert torch.equal(out, expected)


def test_hidden_states_of_rows_apart() -> None:
    """Rows without a place stay as they are."""
    torch.manual_seed(0)
    pool, source = torch.randn(40, 1100), torch.zeros(4)
    which = torch.tensor([[3, 39], [0, 3], [7, 8]])
    places = (pool.data_ptr() - source.data_ptr()) // 4 + which * 1100
    places[1, 0] = NO_PLACE
    out = torch.full((3, 2200), 5.0)
    expected = pool[which].view(3, 2200)
    expected[1, :1100] = 5.0
    gather_states(source, places, out)
    assert torch.equal(out, expected)


# Products of routed experts, and the steps around products of 8-bit integers


EXPERTS, OUTS, INS = 5, 70, 48
ROUTES = {
    "all to one": [3] * 70,
    "a tile and a row": [0] * 32 + [1] * 33 + [4],
    "one row": [4],
    "none to the first and last": [1, 1, 2, 3, 3, 3],
    "every one": [0, 1, 2, 3, 4],
}


@pytest.fixture
def experts() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(EXPERTS, OUTS, INS), torch.randn(EXPERTS, OUTS)


@pytest.mark.parametrize(
    ("route", "has_bias", "dtype"),
    [
        ("all to one", False, torch.float32),
        ("a tile and a row", True, torch.float16),
        ("one row", True, torch.float32),
        ("none to the first and last", False, torch.float16),
        ("every one", True, torch.float32),
    ],
)
def test_rows_are_multiplied_by_their_experts(
    experts: tuple[Tensor, Tensor], route: str, has_bias: bool, dtype: torch.dtype
) -> None:
    weights, biases = (each.to(dtype) for each in experts)
    chosen = torch.tensor(ROUTES[route])
    x = torch.randn(len(chosen), INS).to(dtype)
    found = multiply_by_experts(x, weights, biases if has_bias else None, chosen)
    expected = torch.einsum("ri,roi->ro", x.double(), weights.double()[chosen])
    expected = expected + biases.double()[chosen] if has_bias else expected
    torch.testing.assert_close(found.double(), expected, atol=2e-2 if dtype.itemsize == 2 else 1e-4,
                               rtol=1e-3)  # fmt: skip
    # A row alone has the same bits, whatever rows are beside it.
    for row in {0, len(x) // 2, len(x) - 1}:
        alone = multiply_by_experts(
            x[row : row + 1], weights, biases if has_bias else None, chosen[row : row + 1]
        )
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("ins", "most"), [(256, 64), (72, 64), (40, 512), (384, 512), (768, 512), (1536, 512)]
)
def test_rows_in_8_bits_are_those_of_the_definition(
    ins: int, most: int, dtype: torch.dtype
) -> None:
    """Bit by bit, with every number of parts that a block has."""
    torch.manual_seed(0)
    x = torch.randn(6, ins).to(dtype)
    x[1], x[2], x[3, 7], x[4, -1] = 0, x[2] * 1e-5, torch.nan, torch.inf
    size = block_size(ins, most)
    values, scales = quantise_rotated(x, size)
    expected, factors = quantise_rows(x, size)
    assert torch.equal(values, expected)
    assert torch.equal(scales.view(torch.int32)[:3], factors.view(torch.int32)[:3])
    assert scales[3:5].isnan().all()
    assert scales[5] == factors[5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_integer_sums_are_scaled_as_defined(has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sums = torch.randint(-(2**31), 2**31 - 1, (9, 1304)).int()
    rows, outs, bias = 1e-7 * torch.randn(5), torch.randn(1300), torch.randn(1300)
    given = (sums, rows, outs, bias if has_bias else None, dtype)
    assert torch.equal(scaled_sums(*given), scale_sums(*given))
