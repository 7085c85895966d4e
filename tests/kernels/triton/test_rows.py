"""Row kernels in Triton against the same in torch, whose caches they must fill alike."""

import pytest
import torch
from triton_cases import MILLION, in_far_pages, in_pages

from paceline.bench.reference import ReferenceRows
from paceline.cuda.triton.backend import TritonRows
from paceline.kernels import Norm, QueryBlock, plan_trees
from paceline.kernels.rotated import IntSums


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
