"""Native calls of programs against their operations one by one: a pass, and those of drafters."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from decoder_cases import FAMILIES, extend, load, random_tokens, run
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from one_by_one import run_one_by_one
from torch import Tensor

from paceline.decoder import Decoder, LocalCache
from paceline.decoder.linear import Linear
from paceline.kernels import (
    Context,
    Executor,
    Heads,
    LayerTable,
    Norm,
    Pass,
    Probe,
    QueryBlock,
    Recorder,
    TreePlan,
    plan_trees,
)
from paceline.kernels.program import Program


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Everything:
    """Wants the queries of some rows, and the scores of the first row of every block."""

    def __init__(self, decoder: Decoder, plan: TreePlan, rows: Sequence[int]) -> None:
        config = decoder.config
        self.q: dict[int, Tensor] = {}
        self._rows = rows
        self.scores = {
            (layer, index): torch.zeros(config.kv_heads, max(1, block.start))
            for layer in range(config.layers)
            for index, block in enumerate(plan.blocks)
        }

    def probes(self, layer: int) -> list[Probe]:
        return [Probe(i, 0, out) for (at, i), out in self.scores.items() if at == layer]

    def rows(self, layer: int) -> Sequence[int]:
        return self._rows

    def attended(self, layer: int, q: Tensor) -> None:
        self.q[layer] = q


def batch(
    decoder: Decoder, shapes: Sequence[tuple[int, tuple[int, ...] | None, int]], seed: int
) -> tuple[list[LocalCache], list[QueryBlock], Tensor]:
    """Sequences with random texts, and a block behind each: start, parents, length."""
    caches, blocks = [], []
    for index, (start, parents, length) in enumerate(shapes):
        caches.append(LocalCache(decoder.config))
        if start:
            extend(decoder, caches[-1], random_tokens(start, seed + index))
        caches[-1].reserve(length)
        blocks.append(QueryBlock(index, start, parents, length))
    return caches, blocks, random_tokens(sum(each[2] for each in shapes), seed)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@example(name="gemma4-small", starts=[60, 1], steps=[0, 1], selects=True, seed=0)  # shared KV
@given(
    name=st.sampled_from(sorted(FAMILIES)),
    starts=st.lists(st.sampled_from([0, 1, 60, 256, 300]), min_size=1, max_size=3),
    steps=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    selects=st.booleans(),
    seed=st.integers(0, 100),
)
def test_one_call_is_close_to_the_operations_one_by_one(
    models: dict[str, Path], name: str, starts: list[int], steps: list[int], selects: bool,
    seed: int,
) -> None:  # fmt: skip
    decoder = load(models, name)
    parents = tuple(max(-1, node - 1 - step) for node, step in enumerate(steps))
    shapes = [(s, None if i % 2 else parents, len(parents)) for i, s in enumerate(starts)]
    caches, blocks, tokens = batch(decoder, shapes, seed)
    rows = torch.tensor([len(tokens) - 1, 0]) if selects else None
    found, expected = [], []
    runs = (Executor.run, lambda executor, call: run_one_by_one(executor._program, call))
    for way, into in zip(runs, (found, expected), strict=True):
        plan = plan_trees(blocks)
        observer = Everything(decoder, plan, [len(tokens) - 1, 0, 0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Executor, "run", way)
            result = decoder.forward(
                tokens, plan, caches, logit_rows=rows, taps=(1, 0), observer=observer
            )
        keys = [
            plane[:, block.start : block.stop].clone()
            for cache, block in zip(caches, blocks, strict=True)
            for plane in cache.layer(decoder.config.kv_layers - 1)
        ]
        into += [result.logits, *result.taps, *observer.q.values(), *keys]
        into += observer.scores.values()
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3", torch.float32), ("qwen3", torch.bfloat16), ("qwen3-moe", torch.bfloat16)],
)
def test_slices_and_threads_do_not_change_bits(
    models: dict[str, Path], name: str, dtype: torch.dtype
) -> None:
    """More rows than a slice holds, in several sequences, with rows of logits from all of them."""
    decoder = load(models, name, dtype)
    shapes = [(0, None, 200), (130, (-1, 0, 0, 1), 4), (0, None, 256), (3, None, 250), (9, None, 1)]
    caches, blocks, tokens = batch(decoder, shapes, 0)
    blocks += [QueryBlock(2, 256, None, 70), QueryBlock(4, 10, None, 256)]
    caches[2].reserve(400)
    caches[4].reserve(400)
    tokens = torch.cat([tokens, random_tokens(326, 5)])
    plan = plan_trees(blocks)
    rows = torch.tensor([len(tokens) - 1, 0, 203, 459, 460, 600, 711, 3])
    alone = torch.cat(
        [
            decoder.forward(
                tokens[first : first + block.length], plan_trees([block]), caches, logit_rows=None
            ).logits
            for block, first in zip(blocks, plan.offsets, strict=False)
        ]
    )
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        result = decoder.forward(tokens, plan_trees(blocks), caches, logit_rows=rows, taps=(1,))
        assert torch.equal(result.logits, alone[rows])
        assert result.taps[0].shape == (len(tokens), decoder.config.hidden)
        observer = Everything(decoder, plan, [0, 711])
        observed = decoder.forward(
            tokens, plan_trees(blocks), caches, logit_rows=rows, observer=observer
        )
        assert torch.equal(observed.logits, alone[rows])


def test_two_threads_run_one_decoder(models: dict[str, Path]) -> None:
    decoder = load(models, "llama", torch.bfloat16)
    tokens = random_tokens(300)
    expected = run(decoder, tokens)
    wrong: list[int] = []

    def generate(most: int) -> None:
        for _ in range(3):
            if not torch.equal(run(decoder, tokens, most), expected):
                wrong.append(most)

    running = [threading.Thread(target=generate, args=(most,)) for most in (3, 50, 256)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong


def test_what_does_not_exist_is_refused(models: dict[str, Path]) -> None:
    decoder = load(models, "llama")
    cache = LocalCache(decoder.config)
    plan = plan_trees([QueryBlock(0, 0, None, 2)])
    for tokens, rows in (([3, 101], None), ([-1, 3], None), ([3, 3], [2])):
        selected = None if rows is None else torch.tensor(rows)
        with pytest.raises(IndexError, match=r"vocabulary of 101.* batch of 2 rows"):
            decoder.forward(torch.tensor(tokens), plan, [cache], logit_rows=selected)
    beyond = plan_trees([QueryBlock(0, cache.capacity - 1, None, 2)])
    with pytest.raises(ValueError, match=f"ends at slot {cache.capacity + 1}"):
        decoder.forward(torch.tensor([3, 3]), beyond, [cache], logit_rows=None)
    with pytest.raises(ValueError, match="sequence 0"):
        decoder.forward(torch.tensor([3, 3]), plan, [], logit_rows=None)
    other = LocalCache(load(models, "qwen3").config)
    with pytest.raises(ValueError, match="cache 0 has 2 layers"):
        decoder.forward(torch.tensor([3, 3]), plan, [other], logit_rows=None)


def test_no_rows_of_logits(models: dict[str, Path]) -> None:
    decoder = load(models, "llama")
    cache = LocalCache(decoder.config)
    none = torch.empty(0, dtype=torch.int64)
    plan = plan_trees([QueryBlock(0, 0, None, 5)])
    result = decoder.forward(random_tokens(5), plan, [cache], logit_rows=none, taps=(0, 1))
    assert result.logits.shape == (0, 101)
    again = decoder.forward(random_tokens(5), plan, [cache], logit_rows=None, taps=(0, 1))
    assert all(map(torch.equal, result.taps, again.taps))


HEADS = Heads(q_heads=6, kv_heads=2, dim=16)
WIDTH, LAYERS, SLOTS = 48, 2, 700


class Cache:
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
    shapes=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([1, 2, 5, 256, 257, 700])),
        min_size=1,
        max_size=4,
    ),
    window=st.sampled_from([None, 1, 30, 300]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_all_rows_of_a_block_attend_to_the_context(
    shapes: list[tuple[int, int]], window: int | None, dtype: torch.dtype
) -> None:
    """One native call is close to the operations one by one; its bits are those of each alone."""
    program = reading(window)
    executor = Executor(program)

    def call(chosen: list[int]) -> Pass:
        lengths = [shapes[i][0] for i in chosen]
        blocks = [QueryBlock(at, 0, None, n) for at, n in enumerate(lengths)]
        caches = [Cache(i, dtype) for i in chosen]
        contexts = [Context(cache, shapes[i][1]) for i, cache in zip(chosen, caches, strict=True)]
        tokens = torch.cat([torch.arange(n) + i for i, n in zip(chosen, lengths, strict=True)])
        rows = torch.arange(len(tokens)).flip(0)
        return Pass(tokens, plan_trees(blocks), caches, table(), rows, contexts=contexts)

    everything = list(range(len(shapes)))
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
    blocks = [QueryBlock(i, 7 * i, None, n) for i, n in enumerate(lengths)]
    inputs = torch.randn(sum(lengths), WIDTH)
    results = []
    for way in (Executor(program).run, lambda call: run_one_by_one(program, call)):
        caches = [Cache(i, dtype) for i in range(len(lengths))]
        result = way(Pass(None, plan_trees(blocks), caches, table(), inputs=inputs))
        assert not result.logits.numel()
        results.append(torch.cat([cache.store for cache in caches]).float())
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_a_context_longer_than_its_cache_is_refused() -> None:
    cache = Cache(0, torch.float32)
    block = QueryBlock(0, 0, None, 1)
    for length in (0, SLOTS + 1):
        call = Pass(
            torch.tensor([1]), plan_trees([block]), [cache], table(), torch.tensor([0]),
            contexts=[Context(cache, length)],
        )  # fmt: skip
        with pytest.raises(ValueError, match=r"context|block|keys"):
            Executor(reading(None)).run(call)
