"""Attention calls over caches and pages, and what they should give."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.bench.gpu.cases import PAGE
from paceline.kernels import PagedPlane, QueryBlock, TreePlan, plan_trees
from paceline.kernels.caches import Plane, span


@dataclass
class Case:
    plan: TreePlan  # the packed blocks
    q: Tensor  # `[M, Hq, D]`
    keys: Sequence[Plane]  # per sequence
    values: Sequence[Plane]  # per sequence
    window: int | None = None  # sliding window or None

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)


def random_tree(nodes: int) -> tuple[int, ...]:
    reach = int(torch.randint(1, 9, ()))
    return tuple(max(-1, node - 1 - int(torch.randint(0, reach, ()))) for node in range(nodes))


def make_case(
    device: torch.device, lengths: Sequence[int], nodes: Sequence[int], heads: tuple[int, int],
    dim: int, dtype: torch.dtype, *, paged: bool = False, window: int | None = None,
) -> Case:  # fmt: skip
    """Sequences of some prefix lengths with trees of this many nodes; unwritten slots are NaN."""
    blocks = [
        QueryBlock(index, length, random_tree(count), count)
        for index, (length, count) in enumerate(zip(lengths, nodes, strict=True))
    ]
    plan = plan_trees(blocks, device=device)
    q = torch.randn(plan.rows, heads[0], dim, device=device).to(dtype)
    if paged:
        return Case(plan, q, *_pages(device, blocks, heads[1], dim, dtype), window)
    keys, values = ([_cache(device, s, heads[1], dim, dtype) for s in blocks] for _ in range(2))
    return Case(plan, q, keys, values, window)


def _cache(
    device: torch.device, block: QueryBlock, heads: int, dim: int, dtype: torch.dtype
) -> Tensor:
    cache = torch.randn(heads, block.stop + 7, dim, device=device, dtype=dtype)
    cache[:, block.stop :] = torch.nan
    return cache


def _pages(
    device: torch.device, blocks: Sequence[QueryBlock], heads: int, dim: int, dtype: torch.dtype
) -> tuple[list[PagedPlane], list[PagedPlane]]:
    """Pages of all sequences in random order, over one pool."""
    counts = [-(-block.stop // PAGE) for block in blocks]
    order = torch.randperm(sum(counts), device=device).int()
    tables = torch.zeros(len(blocks), max(counts), dtype=torch.int32, device=device)
    begin = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[begin : begin + count]
        begin += count
    pool = torch.randn(sum(counts), 2, heads, PAGE, dim, device=device, dtype=dtype)
    for row, block in enumerate(blocks):
        pool[int(tables[row, counts[row] - 1]), :, :, (block.stop - 1) % PAGE + 1 :] = torch.nan
    both = [
        [PagedPlane(pool[:, kind], tables, row, count * PAGE) for row, count in enumerate(counts)]
        for kind in (0, 1)
    ]
    return both[0], both[1]


def expected(case: Case, dtype: torch.dtype) -> Tensor:
    """Masked softmax attention with every operation in `dtype`, ``[M, Hq, D]``."""
    out = torch.empty_like(case.q, dtype=dtype)
    for index, block in enumerate(case.plan.blocks):
        rows = slice(case.plan.offsets[index], case.plan.offsets[index + 1])
        key = span(case.keys[block.sequence], 0, block.stop)
        value = span(case.values[block.sequence], 0, block.stop)
        group = case.q.shape[1] // key.shape[0]
        hidden = ~_seen(case, block).to(case.q.device)
        for head in range(case.q.shape[1]):  # one at a time, because scores are large
            scores = case.q[rows, head].to(dtype) @ key[head // group].to(dtype).T * case.scale
            weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
            out[rows, head] = weights @ value[head // group].to(dtype)
    return out


def _seen(case: Case, block: QueryBlock) -> Tensor:
    seen = torch.ones(block.length, block.stop, dtype=torch.bool)
    seen[:, block.start :] = torch.from_numpy(block.ancestors())
    if case.window is not None:
        at = torch.tensor(block.depths) + block.start
        seen &= torch.cat([torch.arange(block.start), at]) > at[:, None] - case.window
    return seen
