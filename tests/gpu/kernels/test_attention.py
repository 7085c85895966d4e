"""Attention kernels against float64, over the shapes that they must serve."""

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import PAGE, Case, expected, make_case

from paceline.kernels import PagedPlane, Probe, tree_attention
from paceline.kernels.attention import AttentionCall, record_scores

pytestmark = pytest.mark.gpu

HEADS = [(4, 4), (8, 2), (32, 8), (28, 4), (5, 1)]
BF16 = torch.bfloat16
LONG = 131_072
OTHERS = 2 << 30  # memory that is left to tests in other processes. Unit: bytes.


def check(case: Case) -> None:
    """Errors against float64 are at most twice those of PyTorch in the same type.

    The largest of a hundred thousand errors varies more, hence its wider bound.
    """
    out = torch.full_like(case.q, torch.nan)
    tree_attention(
        case.q, case.keys, case.values, case.plan, scale=case.scale, window=case.window, out=out
    )
    right = expected(case, torch.float64)
    ours, plain = (each.double() - right for each in (out, expected(case, case.q.dtype)))
    assert float(ours.square().mean().sqrt()) <= 2 * float(plain.square().mean().sqrt()) + 1e-7
    assert float(ours.abs().max()) <= 4 * float(plain.abs().max()) + 1e-7


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", HEADS)
def test_short_prefixes_and_random_trees(
    device: torch.device, heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> None:
    lengths = [0, 1, 63, 255, 1000]
    nodes = torch.randint(1, 65, (len(lengths),)).tolist()
    check(make_case(device, lengths, nodes, heads, dim, dtype, paged=dim % 64 == 0))


@pytest.mark.parametrize(
    ("lengths", "nodes", "heads", "dim", "paged", "window"),
    [
        ([777] * 4, [256, 255, 129, 1], (32, 8), 128, False, None),
        ([777], [256], (8, 2), 256, False, None),
        ([0, 300, 5000], [40, 64, 9], (28, 4), 128, False, 256),
        ([LONG, 0, 9000], [64, 256, 1], (32, 8), 128, False, None),
        ([LONG, 7], [3, 256], (5, 1), 96, True, None),
        ([512], [1], (68 * 8, 8), 128, False, None),  # LongSpec's cross-attention
        *(([LONG, LONG // 4, 0], [5, 256, 17], heads, 128, True, None) for heads in HEADS),
    ],
)
def test_long_wide_and_windowed(
    device: torch.device, lengths: list[int], nodes: list[int], heads: tuple[int, int], dim: int,
    paged: bool, window: int | None,
) -> None:  # fmt: skip
    check(make_case(device, lengths, nodes, heads, dim, BF16, paged=paged, window=window))


def test_offsets_beyond_32_bits(device: torch.device) -> None:
    """One sequence in the first and the last pages of a pool of more than 2^32 elements."""
    count = (1 << 32) // (2 * 2 * PAGE * 128) + 8
    shape, dtype = (count, 2, 2, PAGE, 128), torch.float16
    needed, (free, _) = math.prod(shape) * dtype.itemsize, torch.cuda.mem_get_info(device)
    if free < needed + OTHERS:
        pytest.skip(f"the pool takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} are free")
    case = make_case(device, [1000], [9], (8, 2), 128, dtype, paged=True)
    pool = torch.full(shape, torch.nan, dtype=dtype, device=device)
    table = torch.tensor([[0, count - 1, 1, count - 2]], dtype=torch.int32, device=device)
    for plane, kind in ((case.keys[0], 0), (case.values[0], 1)):
        assert isinstance(plane, PagedPlane)
        pool[table[0].long(), kind] = plane.pool[plane.tables[0, :4].long()]
    keys, values = ([PagedPlane(pool[:, kind], table, 0, 4 * PAGE)] for kind in (0, 1))
    check(replace(case, keys=keys, values=values))


@pytest.mark.parametrize("window", [None, 900])
def test_recorded_scores_are_right_and_change_no_bit(
    device: torch.device, window: int | None
) -> None:
    case = make_case(device, [5000, 70], [16, 1], (32, 8), 128, torch.float16, window=window)
    arguments = (case.q, case.keys, case.values, case.plan)

    def probes() -> list[Probe]:
        return [Probe(0, node, torch.full((8, 5000), torch.nan, device=device)) for node in (0, 15)]

    found, right = probes(), probes()
    plain = tree_attention(*arguments, scale=case.scale, window=window)
    scored = tree_attention(*arguments, scale=case.scale, window=window, probes=found)
    assert plain.equal(scored)
    call = AttentionCall(case.q, case.keys, case.values, case.plan, case.scale, window, plain)
    record_scores(call, right)
    for ours, theirs in zip(found, right, strict=True):
        assert ours.out.isinf().equal(theirs.out.isinf()), "the window hides other positions"
        torch.testing.assert_close(ours.out, theirs.out, atol=0.05, rtol=0)
