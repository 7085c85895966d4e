"""Random trees, caches and queries, run as a tree and as single paths."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels import MAX_TREE_NODES, TreeSegment, plan_trees, tree_attention
from paceline.kernels._native import CpuKernels, cpu_kernels, load
from paceline.kernels.cache_rows import to_rows

HEADS = [(6, 2, 64), (4, 4, 16), (8, 2, 80), (3, 1, 96), (8, 1, 128), (7, 1, 32)]
PREFIXES = [0, 1, 7, 15, 16, 200, 250, 255, 256, 257, 511, 512, 700, 1025, 2303, 2304]


def compiled(level: str) -> CpuKernels:
    """The kernels of a level; skips the test where they cannot be compiled."""
    if cpu_kernels().library is None:
        pytest.skip(f"no compiled kernels: {cpu_kernels().origin}")
    return load(level)


@contextmanager
def in_tiles(library: ctypes.CDLL) -> Iterator[None]:
    """bfloat16 is multiplied in tiles: of the processor, or emulated ones."""
    library.paceline_set_numerics(1)
    try:
        yield
    finally:
        library.paceline_set_numerics(0)


@st.composite
def trees(draw: st.DrawFn, most: int = 64) -> tuple[int, ...] | None:
    """Parents of a tree of any shape, bushy to deep, or None for a chain."""
    count = draw(st.integers(1, most))
    reach = draw(st.sampled_from([0, 1, 2, 5, MAX_TREE_NODES]))
    if reach == 0:
        return (-1, *range(count - 1))
    steps = draw(st.lists(st.integers(0, reach - 1), min_size=count, max_size=count))
    return tuple(max(-1, node - 1 - step) for node, step in enumerate(steps))


@dataclass
class Case:
    """One segment with the cache and queries it runs on."""

    segment: TreeSegment
    q: Tensor
    key: Tensor
    value: Tensor
    window: int | None

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def path(self, node: int) -> list[int]:
        """Nodes from the root of the block down to ``node``."""
        parents = self.segment.parents or tuple(range(-1, self.segment.length - 1))
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        return path

    def run(self) -> tuple[Tensor, Tensor]:
        """Attention in float32 and log-sum-exp of the whole block."""
        return attend([self.segment], self.q, [self.key], [self.value], self.window)

    def run_alone(self, node: int) -> tuple[Tensor, Tensor]:
        """The same of one node, decoded as the only row behind its own path."""
        path = self.path(node)
        slots = [*range(self.segment.start), *(self.segment.start + n for n in path)]
        segment = TreeSegment(0, len(slots) - 1, None, 1)
        q = self.q[node : node + 1]
        return attend([segment], q, [self.key[:, slots]], [self.value[:, slots]], self.window)


def make_case(
    seed: int,
    start: int,
    parents: tuple[int, ...],
    heads: tuple[int, int, int] = HEADS[0],
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    spare: int = 3,
) -> Case:
    """A segment over random keys, values (of ``dtype``) and rather peaked queries."""
    generator = torch.Generator().manual_seed(seed)
    q_heads, kv_heads, dim = heads
    shape = (kv_heads, start + len(parents) + spare, dim)
    key = torch.randn(shape, generator=generator)
    value = torch.randn(shape, generator=generator)
    value[:, start + len(parents) :] = float("nan")  # unwritten slots must not matter
    q = 3 * torch.randn(len(parents), q_heads, dim, generator=generator)
    q = q if dtype is torch.int8 else q.to(dtype)
    segment = TreeSegment(0, start, parents, len(parents))
    return Case(segment, q, to_rows(key, dtype), to_rows(value, dtype), window)


def attend(
    segments: list[TreeSegment],
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Tree attention with float32 results, so that no rounding hides a difference."""
    return tree_attention(
        q,
        keys,
        values,
        plan_trees(segments),
        scale=q.shape[2] ** -0.5,
        window=window,
        return_lse=True,
        out=torch.empty(q.shape),
    )
