"""Random trees, caches and queries, run as a tree and as single paths; compiled kernels."""

import ctypes
import fcntl
import math
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st
from reference import reference_attention
from torch import Tensor

from paceline.decoder.linear import Linear
from paceline.kernels import (
    MAX_TREE_NODES,
    AttentionCall,
    Heads,
    LayerTable,
    Norm,
    Pass,
    QueryBlock,
    Recorder,
    SamplingRules,
    TreePlan,
    _compile,
    plan_trees,
    tree_attention,
)
from paceline.kernels._compile import SANITIZERS, levels_here
from paceline.kernels._native import cpu_kernels, load
from paceline.kernels.caches import to_rows
from paceline.kernels.executor import NativeProgram
from paceline.kernels.linear import PackedMatrix

# Levels that tests of kernels run at. With sanitizers, the fastest alone, which tests of equal bits
# compare with plain C: each level takes long to compile and to run.
LEVELS = levels_here()[: 1 if os.environ.get(SANITIZERS) else None]
HEADS = [(6, 2, 64), (4, 4, 16), (8, 2, 80), (3, 1, 96), (8, 1, 128), (7, 1, 32), (36, 2, 48)]
PREFIXES = [0, 1, 7, 15, 16, 200, 250, 255, 256, 257, 511, 512, 700, 1025, 2303, 2304]


def usually(level: str, *more: str) -> Any:
    """A parameter of tests that `make test` has for the fastest level and for plain C alone."""
    usual = level in (LEVELS[0], "generic")
    value = (level, *more) if more else level
    return value if usual else pytest.param(value, marks=pytest.mark.slow)


def compiled(level: str) -> ctypes.CDLL:
    """Load the kernels of a level. Those of other processors than this one are compiled for tests
    with few optimisations, in a third of the time, by one of the processes that run tests."""
    cpu_kernels()  # has OpenMP's runtime loaded
    if level == LEVELS[0]:
        return load(level).library
    lock = Path(tempfile.gettempdir(), f"paceline-kernels-{os.getuid()}-{level}.lock")
    flags = ("-O1", *_compile._FLAGS[1:])
    with lock.open("w") as held, patch.object(_compile, "_FLAGS", flags):
        fcntl.flock(held, fcntl.LOCK_EX)
        return load(level).library


class _Cache:
    """One layer of one sequence, as programs see it."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._layer = keys, values
        self.table = LayerTable([self._layer])

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._layer


# Numerics of some processors. All others emulate them in tests.
OWN_NUMERICS = ("amx", "avx512_bf16")
# Levels and numerics of the compiled attention.
BACKENDS = [
    *(usually(level, "portable") for level in LEVELS),
    *((LEVELS[0], numerics) for numerics in OWN_NUMERICS),
]


class Attends(Protocol):
    def attend(self, call: AttentionCall) -> None: ...


class ProgramBackend:
    """The compiled attention of a level as a backend: programs of attention alone.

    With numerics of some processors, instructions multiply bfloat16, or their emulation does.
    """

    name = "native"

    def __init__(self, library: ctypes.CDLL, numerics: str = "portable") -> None:
        self.library, self.numerics = library, numerics

    def attend(self, call: AttentionCall) -> None:
        _, q_heads, dim = call.q.shape
        assert call.scale == dim**-0.5
        heads = Heads(q_heads, call.keys[0].shape[0], dim, cap=call.cap)
        program = Recorder(heads, torch.float32, numerics=self.numerics)
        q = program.rotate_queries(program.input(q_heads * dim))
        program.tap(program.attend(q, 0, call.window, call.sinks), 0)
        caches = [_Cache(k, v) for k, v in zip(call.keys, call.values, strict=True)]
        unturned = torch.tensor([1.0, 0.0]).repeat_interleave(dim // 2)
        table = unturned.repeat(call.plan.longest + 1, 1)
        probes, inputs = {0: call.probes} if call.probes else {}, call.q.flatten(1)
        done = NativeProgram(self.library, program.finish()).run(
            Pass(None, call.plan, caches, table, taps=(0,), probes=probes, inputs=inputs)
        )
        call.out.copy_(done.taps[0].view(call.q.shape))


class ProgramRows:
    """The compiled row operations of a level: programs of one operation."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def add_norm(self, x: Tensor, delta: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
        changed = []
        for wanted in range(2):
            program = Recorder(Heads(1, 1, 16), torch.float32)
            added = program.embed(delta)
            residual = program.input(x.shape[1])
            out = (residual, program.add_norm(residual, added, norm))[wanted]
            changed.append(self._run(program, out, x.clone(), plan_of(len(x))))
        x.copy_(changed[0])
        return changed[1].to(dtype)

    def multiply(self, x: Tensor, packed: PackedMatrix, numerics: str) -> Tensor:
        program = Recorder(Heads(1, 1, 16), torch.float32, numerics=numerics)
        out = program.multiply(program.input(packed.ins), Linear(packed))
        return self._run(program, out, x, plan_of(len(x)))

    def convolve(self, x: Tensor, base: Tensor, own: Tensor, which: int, length: int) -> Tensor:
        plan = plan_trees([QueryBlock(0, 0, None, length)] * (len(x) // length))
        program = Recorder(Heads(1, 1, 16), torch.float32)
        both = program.input(x.shape[1] + own.shape[1])
        selects = torch.eye(x.shape[1] + own.shape[1]).split([x.shape[1], own.shape[1]])
        inputs, weights = (program.multiply(both, Linear(each)) for each in selects)
        out = program.convolve(inputs, weights, base, which)
        return self._run(program, out, torch.cat([x, own], 1), plan)

    def gate(self, gate_up: Tensor, *, gelu: bool = False) -> Tensor:
        program = Recorder(Heads(1, 1, 16), torch.float32)
        gated = program.gate(program.input(gate_up.shape[1]), gelu=gelu)
        return self._run(program, gated, gate_up, plan_of(len(gate_up)))

    def rotate(
        self, heads: Tensor, norms: tuple[Norm, Norm] | None, table: Tensor, plan: TreePlan,
        keys: Sequence[Tensor], values: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        dim, kv_heads = table.shape[1], keys[0].shape[0]
        q_heads = heads.shape[1] // dim - 2 * kv_heads
        program = Recorder(Heads(q_heads, kv_heads, dim), torch.float32)
        q = program.rotate(program.input(heads.shape[1]), norms, 0)
        caches = [_Cache(k, v) for k, v in zip(keys, values, strict=True)]
        return self._run(program, q, heads, plan, caches, table).view(plan.rows, q_heads, dim)

    def _run(
        self,
        recorder: Recorder,
        out: int,
        inputs: Tensor,
        plan: TreePlan,
        caches: Sequence[_Cache] = (),
        table: Tensor | None = None,
    ) -> Tensor:
        recorder.select(out)
        program = recorder.finish()
        caches = caches or [_Cache(*torch.zeros(2, 1, plan.rows, 16))]
        table = torch.zeros(plan.rows, 16) if table is None else table
        tokens = torch.arange(plan.rows) if program.operations[0].table is not None else None
        call = Pass(tokens, plan, caches, table, inputs=inputs)
        return NativeProgram(self.library, program).run(call).logits


def plan_of(rows: int) -> TreePlan:
    return plan_trees([QueryBlock(0, 0, None, rows)])


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 64) -> tuple[int, ...]:
    """Parents of a tree of any shape, bushy to deep."""
    count = draw(st.integers(1, max_nodes))
    reach = draw(st.sampled_from([0, 1, 2, 5, MAX_TREE_NODES]))
    if reach == 0:
        return (-1, *range(count - 1))
    steps = draw(st.lists(st.integers(0, reach - 1), min_size=count, max_size=count))
    return tuple(max(-1, node - 1 - step) for node, step in enumerate(steps))


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """So many threads for kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class Case:
    """One block with the cache and queries it runs on."""

    block: QueryBlock
    q: Tensor
    key: Tensor
    value: Tensor
    window: int | None

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def path(self, node: int) -> list[int]:
        """Nodes from the root of the block down to ``node``."""
        parents = self.block.parents or tuple(range(-1, self.block.length - 1))
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        return path

    def run(self, texts: int = 1) -> Tensor:
        """Attention in float32 of the whole block, in as many texts at once."""
        blocks = [replace(self.block, sequence=index) for index in range(texts)]
        keys, values = [self.key] * texts, [self.value] * texts
        return attend(blocks, self.q.repeat(texts, 1, 1), keys, values, self.window)

    def run_by(self, backend: Attends, cap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
        """The same by a backend, with a soft cap of scores and sinks."""
        out = torch.empty(self.q.shape)
        planes = [self.key], [self.value], plan_trees([self.block])
        how = self.scale, self.window
        backend.attend(AttentionCall(self.q, *planes, *how, out, cap=cap, sinks=sinks))
        return out

    def expected(self) -> tuple[Tensor, Tensor]:
        plan = plan_trees([self.block])
        return reference_attention(
            self.q, [self.key], [self.value], plan, scale=self.scale, window=self.window
        )

    def run_alone(self, node: int) -> Tensor:
        """The same of one node, decoded as the only row behind its own path."""
        start, path = self.block.start, torch.tensor(self.path(node))
        key, value = (
            torch.cat([rows[:, :start], rows[:, start + path]], 1)
            for rows in (self.key, self.value)
        )
        block = QueryBlock(0, start + len(path) - 1, None, 1)
        return attend([block], self.q[node : node + 1], [key], [value], self.window)

    def assert_alone(self, nodes: Sequence[int], texts: int = 1, threads: int = 1) -> None:
        """Check that these nodes have the bits of their paths alone, in each of the texts."""
        with use_threads(threads):
            outs = self.run(texts).split(self.block.length)
        with use_threads(1):
            for node in nodes:
                alone = self.run_alone(node)[0]
                assert all(torch.equal(alone, out[node]) for out in outs), (
                    f"node {node} of {self.block} behind a window of {self.window}, "
                    f"{self.key.dtype}, {texts} texts, {threads} threads"
                )


def make_case(
    seed: int,
    start: int,
    parents: tuple[int, ...],
    heads: tuple[int, int, int] = HEADS[0],
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    spare: int = 3,
) -> Case:
    """A block over random keys, values (of ``dtype``) and rather peaked queries."""
    generator = torch.Generator().manual_seed(seed)
    q_heads, kv_heads, dim = heads
    shape = (kv_heads, start + len(parents) + spare, dim)
    key = torch.randn(shape, generator=generator)
    value = torch.randn(shape, generator=generator)
    value[:, start + len(parents) :] = float("nan")  # unwritten slots must not matter
    q = 3 * torch.randn(len(parents), q_heads, dim, generator=generator)
    q = q if dtype is torch.int8 else q.to(dtype)
    block = QueryBlock(0, start, parents, len(parents))
    return Case(block, q, to_rows(key, dtype), to_rows(value, dtype), window)


def sampling_rules(penalties: bool = False) -> st.SearchStrategy[SamplingRules]:
    more: dict[str, st.SearchStrategy[Any]] = {
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 0.5, -0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.25]),
        "logit_bias": st.sampled_from([(), ((3, 2.5), (5, -math.inf))]),
    }
    return st.builds(
        SamplingRules,
        temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
        top_k=st.sampled_from([0, 0, 1, 3, 40, 5000]),
        top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.999]),
        min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
        seed=st.integers(0, 2**64 - 1),
        **(more if penalties else {}),
    )


DTYPES = (torch.float32, torch.bfloat16, torch.int8)
WINDOWS = (None, None, 1, 33, 40, 128, 256, 300, 512, 1000, 1024, 2100, 4096)


@st.composite
def cases(
    draw: st.DrawFn, max_nodes: int = 64, dtypes: Sequence[torch.dtype] = DTYPES, spare: int = 40
) -> Case:
    """Any tree behind any prefix, with any heads, type of cache and window; the window may begin at
    any column of a chunk."""
    window = draw(st.sampled_from(WINDOWS))
    starts = st.sampled_from(PREFIXES) | st.integers(0, 1300)
    if window:
        starts |= st.sampled_from([0, 200, 240, 255]).map(lambda column: window - 1 + column)
    return make_case(
        draw(st.integers(0, 1000)),
        draw(starts),
        draw(trees(max_nodes)),
        draw(st.sampled_from(HEADS)),
        draw(st.sampled_from(dtypes)),
        window,
        draw(st.integers(0, spare)),
    )


# Heads and windows of models.
WINDOWED = {
    "Gemma 3 270M": ((4, 1, 256), 512),
    "Gemma 3 4B": ((8, 4, 256), 1024),
    "Mistral 7B v0.1": ((32, 8, 128), 4096),
    "gpt-oss 20B": ((64, 8, 64), 128),
}


def windowed_case(name: str, column: int, seed: int, max_nodes: int = MAX_TREE_NODES) -> Case:
    """A deep path with wrong nodes beside it, up to the largest tree that is drafted, where the
    window of a model begins at this column of a chunk."""
    heads, window = WINDOWED[name]
    drawn = random.Random(seed)
    nodes = min(max_nodes, drawn.choice([20, 24, 32, 37, 64, drawn.randint(2, MAX_TREE_NODES)]))
    parents, tip = [-1], 0
    while len(parents) < nodes:
        parents.append(tip)
        if drawn.random() < 0.8:
            tip = len(parents) - 1
    dtype = drawn.choice(DTYPES)
    return make_case(seed, window - 1 + column, tuple(parents), heads, dtype, window)


def attend(
    blocks: list[QueryBlock],
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    window: int | None,
) -> Tensor:
    """Tree attention with float32 results, so that no rounding hides a difference."""
    return tree_attention(
        q, keys, values, plan_trees(blocks), scale=q.shape[2] ** -0.5, window=window,
        out=torch.empty(q.shape),
    )  # fmt: skip
