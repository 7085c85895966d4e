"""Programs of drafters: rows that attend to contexts, inputs that are no tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.decoder.weights import Linear
from paceline.kernels import (
    Context,
    Executor,
    Heads,
    LayerTable,
    Norm,
    Pass,
    Recorder,
    TreeSegment,
    plan_trees,
)
from paceline.kernels.executor import run_one_by_one
from paceline.kernels.program import Program

pytestmark = pytest.mark.bits

HEADS = Heads(q_heads=6, kv_heads=2, dim=16)
WIDTH, LAYERS, SLOTS = 48, 2, 700


class Cache:
    """Random KV of one sequence."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        draws = torch.Generator().manual_seed(seed)
        shape = (LAYERS, 2, HEADS.kv_heads, SLOTS, HEADS.dim)
        self.store = torch.randn(shape, generator=draws).to(dtype)
        self.table = LayerTable([(both[0], both[1]) for both in self.store])

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        keys, values = self.store[index]
        return keys, values


def _matrix(outs: int, ins: int, seed: int) -> Linear:
    return Linear(torch.randn(outs, ins, generator=torch.Generator().manual_seed(seed)) * 0.2)


_NORMS = (Norm(torch.linspace(0.5, 1.5, HEADS.dim), 1e-5),) * 2


def reading(window: int | None) -> Program:
    """Tokens to queries, attention over layer 1 of the contexts, and logits of selected rows."""
    program = Recorder(HEADS, torch.float32)
    x = program.embed(torch.randn(90, WIDTH, generator=torch.Generator().manual_seed(9)))
    wide = HEADS.q_heads * HEADS.dim
    q = program.rotate_queries(program.multiply(x, _matrix(wide, WIDTH, 1)))
    attended = program.attend_context(q, 1, window)
    program.add(x, program.multiply(attended, _matrix(WIDTH, wide, 2)))
    program.multiply(program.select(x), _matrix(90, WIDTH, 3))
    return program.finish()


def writing() -> Program:
    """Inputs to keys and values of both layers."""
    program = Recorder(HEADS, torch.float32)
    x = program.input(WIDTH)
    for layer in range(LAYERS):
        pair = _matrix(2 * HEADS.kv_heads * HEADS.dim, WIDTH, layer)
        program.write(program.multiply(x, pair), _NORMS, layer)
    return program.finish()


def table() -> Tensor:
    angles = torch.arange(SLOTS)[:, None] * torch.logspace(0, -3, HEADS.dim // 2)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


@settings(max_examples=25)
@given(
    blocks=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([1, 2, 5, 256, 257, 700])),
        min_size=1,
        max_size=4,
    ),
    window=st.sampled_from([None, 1, 30, 300]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_all_rows_of_a_block_attend_to_the_context(
    blocks: list[tuple[int, int]], window: int | None, dtype: torch.dtype
) -> None:
    """One native call is close to the operations one by one; its bits are those of each alone."""
    program = reading(window)
    executor = Executor(program)

    def call(chosen: list[int]) -> Pass:
        lengths = [blocks[i][0] for i in chosen]
        segments = [TreeSegment(at, 0, None, n) for at, n in enumerate(lengths)]
        caches = [Cache(i, dtype) for i in chosen]
        contexts = [Context(cache, blocks[i][1]) for i, cache in zip(chosen, caches, strict=True)]
        tokens = torch.cat([torch.arange(n) + i for i, n in zip(chosen, lengths, strict=True)])
        rows = torch.arange(len(tokens)).flip(0)
        return Pass(tokens, plan_trees(segments), caches, table(), rows, contexts=contexts)

    everything = list(range(len(blocks)))
    together = executor.run(call(everything)).logits
    expected = run_one_by_one(program, call(everything)).logits
    torch.testing.assert_close(together, expected, rtol=1e-3, atol=2e-3)
    alone = [executor.run(call([i])).logits for i in reversed(everything)]
    assert torch.equal(together, torch.cat(alone))


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 256), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_inputs_become_keys_and_values(lengths: list[int], dtype: torch.dtype) -> None:
    program = writing()
    segments = [TreeSegment(i, 7 * i, None, n) for i, n in enumerate(lengths)]
    inputs = torch.randn(sum(lengths), WIDTH)
    results = []
    for run in (Executor(program).run, lambda call: run_one_by_one(program, call)):
        caches = [Cache(i, dtype) for i in range(len(lengths))]
        result = run(Pass(None, plan_trees(segments), caches, table(), inputs=inputs))
        assert not result.logits.numel()
        results.append(torch.cat([cache.store for cache in caches]).float())
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_a_context_longer_than_its_cache_is_refused() -> None:
    cache = Cache(0, torch.float32)
    segment = TreeSegment(0, 0, None, 1)
    for length in (0, SLOTS + 1):
        call = Pass(
            torch.tensor([1]), plan_trees([segment]), [cache], table(), torch.tensor([0]),
            contexts=[Context(cache, length)],
        )  # fmt: skip
        with pytest.raises(ValueError, match=r"context|segment|keys"):
            Executor(reading(None)).run(call)
