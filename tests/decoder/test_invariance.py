"""Bits of logits through the whole decoder: trees, chunks, batches and decoding are one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from decoder_cases import FAMILIES, ask_tree, extend, load, path_to, random_tokens, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.convert import Packer, load_decoder, open_model
from paceline.cuda.graphs import FIXED_SHAPES
from paceline.cuda.served import ServedForward, check_served, served_slots
from paceline.decoder import Decoder, LocalCache, check_batch_invariance
from paceline.decoder.linear import Linear
from paceline.kernels import Executor, Pass, QueryBlock, plan_trees
from paceline.kernels.program import PassResult

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*product(FAMILIES, [torch.bfloat16]), *product(("llama", "qwen3-5-moe"), [torch.float32])],
)
def test_the_self_check_holds(models: dict[str, Path], name: str, dtype: torch.dtype) -> None:
    found = check_batch_invariance(load(models, name, dtype))
    assert (found.holds, found.reason) == (True, "")


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_rules_differ_exactly_where_bits_do(models: dict[str, Path], weights: str) -> None:
    """Those of this processor's own numerics and of portable ones, which may be the same."""
    both = [load_decoder(models["llama"], weights, numerics=name) for name in ("auto", "portable")]
    auto, portable = (check_batch_invariance(decoder).bits for decoder in both)
    assert (auto == portable) == (both[0].rules() == both[1].rules())


def test_the_self_check_notices_a_single_row_summed_another_way(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libraries do that have a kernel of its own for a single row."""
    call = Linear.__call__

    def careless(layer: Linear, x: Tensor) -> Tensor:
        out = call(layer, x)
        if x.shape[0] == 1 and layer is down:
            out[0, -1] *= 1 + 2**-20
        return out

    decoder = load(models, "llama", torch.float32)
    down = decoder.linears()[3]
    monkeypatch.setattr(Linear, "__call__", careless)
    found = check_batch_invariance(decoder)
    assert not found.holds
    assert f"{down.in_features} to {down.out_features}" in found.reason
    assert "batch of 1 rows than" in found.reason


WINDOW = 300


def windowed(folder: Path, dtype: torch.dtype, window: int | None) -> Decoder:
    """A model with a window in its first layer."""
    source = open_model(folder)
    config = replace(source.config(dtype), windows=(window, None))
    return Decoder(config, Packer(config, source.weights(config), "cpu"), "cpu")


def test_the_self_check_notices_deep_trees_behind_a_window(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a deep row leaves its part of a workspace."""

    def careless(executor: Executor, call: Pass) -> PassResult:
        found = run(executor, call)
        assert executor.native is not None
        windows = {op.window for op in executor.native.program.operations}
        deep = any(max(block.depths) > 17 for block in call.plan.blocks)
        if deep and WINDOW in windows and found.taps:
            found.taps[0][0] += 1e-3
        return found

    run = Executor.run
    monkeypatch.setattr(Executor, "run", careless)
    found = check_batch_invariance(windowed(models["qwen3"], torch.float32, WINDOW))
    assert not found.holds
    assert f"behind a window of {WINDOW} than token by token" in found.reason


def served(decoder: Decoder, of_trees: Decoder | None = None) -> ServedForward:
    """As a verifier on a GPU runs its passes, over caches in the memory of the process; trees may
    have another decoder."""
    caches = [LocalCache(decoder.config) for _ in range(2)]
    for cache, slots in zip(caches, served_slots(WINDOW), strict=True):
        cache.reserve(slots)

    def forward(
        tokens: Sequence[int], blocks: Sequence[QueryBlock], *, prompt: bool = False
    ) -> Tensor:
        packed, own = torch.tensor(tokens), of_trees is None or blocks[0].parents is None
        used = decoder if own else of_trees
        assert used is not None
        return used.forward(packed, plan_trees(blocks), caches, logit_rows=None).logits

    return forward


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_of_what_is_served_holds(models: dict[str, Path], dtype: torch.dtype) -> None:
    decoder = windowed(models["qwen3"], dtype, WINDOW)
    found = check_served(served(decoder), decoder.config.vocab_size, WINDOW)
    assert (found.holds, found.reason) == (True, "")


def total(blocks: Sequence[QueryBlock]) -> int:
    return sum(block.length for block in blocks)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        # As where attention walks the slots of a tree and not its paths.
        (lambda blocks, prompt: blocks[0].parents is not None,
         {"position 192", "position 256", "tree where a window of 300 ends"}),
        # As where more rows than a tile has are split between other chunks.
        (lambda blocks, prompt: total(blocks) > 64 and not prompt,
         {f"step of {rows} rows" for rows in FIXED_SHAPES[1:]}),
        # As where a product of few rows is split.
        (lambda blocks, prompt: 1 < total(blocks) < 16 and not prompt,
         {"step of 9 rows", "step where a window of 300 ends"}),
        # As where the graph of a number of rows has a table that is too short.
        *(((lambda blocks, prompt, rows=rows: total(blocks) == rows and not prompt),
           {f"step of {rows} rows"}) for rows in FIXED_SHAPES),
        # As where prompts take another way.
        (lambda blocks, prompt: prompt and blocks[0].length > 200, {"behind a resume,"}),
        (lambda blocks, prompt: prompt and 0 < blocks[0].start < 200, {"prompt in two parts"}),
        (lambda blocks, prompt: prompt and blocks[0].start > 268,
         {"prompt where a window of 300 ends"}),
        (lambda blocks, prompt: blocks[0].start == 0 and len(blocks) > 2,
         {"512 rows", "384 rows"}),
    ],
)  # fmt: skip
def test_the_check_of_what_is_served_names_what_differs(
    models: dict[str, Path], other: Callable[[Sequence[QueryBlock], bool], bool], named: set[str]
) -> None:
    decoder = load(models, "llama", torch.float32)
    forward = served(decoder)

    def careless(
        tokens: Sequence[int], blocks: Sequence[QueryBlock], *, prompt: bool = False
    ) -> Tensor:
        logits = forward(tokens, blocks, prompt=prompt)
        if other(blocks, prompt):
            logits[-1] *= 1 + 2**-20
        return logits

    found = check_served(careless, decoder.config.vocab_size, WINDOW)
    assert not found.holds
    _, _, reasons = found.reason.partition(": ")
    assert len(reasons.split("; ")) == len(named)
    assert all(each in reasons for each in named)


@pytest.mark.parametrize("passed", [0, WINDOW])
def test_a_tree_that_does_not_see_a_window_end_is_found_behind_it(
    models: dict[str, Path], passed: int
) -> None:
    folder = models["llama"]
    decoder, careless = (windowed(folder, torch.float32, window) for window in (WINDOW, None))
    found = check_served(served(decoder, careless), decoder.config.vocab_size, passed)
    assert found.holds == (not passed)
    assert passed == 0 or found.reason.endswith(": a tree where a window of 300 ends")


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(
        [
            *("llama", "mistral", "qwen2-window", "qwen3", "qwen3-moe", "qwen3-5", "lfm2"),
            *("olmo3", "gemma2", "glm4"),
        ]
    ),
    dtype=st.sampled_from(DTYPES),
    start=st.sampled_from([1, 40, 250, 256, 300, 505]),
    steps=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    seed=st.integers(0, 100),
)
def test_a_tree_has_the_bits_of_decoding_each_path(
    models: dict[str, Path], name: str, dtype: torch.dtype, start: int, steps: list[int], seed: int
) -> None:
    decoder = load(models, name, dtype)
    parents = [max(-1, node - 1 - step) for node, step in enumerate(steps)]
    prompt, tree = random_tokens(start, seed), random_tokens(len(parents), seed + 1)
    cache = LocalCache(decoder.config)
    extend(decoder, cache, prompt)
    found = ask_tree(decoder, cache, tree, parents)
    for leaf in {len(parents) - 1, len(parents) // 2}:
        path = path_to(parents, leaf)
        alone = LocalCache(decoder.config)
        extend(decoder, alone, prompt)
        assert torch.equal(extend(decoder, alone, tree[path], max_tokens=1), found[path])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "qwen3-5", "lfm2"])
def test_prefill_in_any_chunks_has_the_bits_of_decoding(
    models: dict[str, Path], name: str, dtype: torch.dtype
) -> None:
    decoder = load(models, name, dtype)
    tokens = random_tokens(290)
    one_by_one = run(decoder, tokens, max_tokens=1)
    for most in (256, 100, 7):
        assert torch.equal(run(decoder, tokens, most), one_by_one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "qwen3-5", "lfm2"])
def test_committed_paths_continue_as_if_decoded(
    models: dict[str, Path], name: str, dtype: torch.dtype
) -> None:
    decoder = load(models, name, dtype)
    parents = (-1, 0, 0, 2, 1, 3, 5, 4)
    prompt, tree, rest = (random_tokens(n, n) for n in (252, 8, 6))
    cache, alone = LocalCache(decoder.config), LocalCache(decoder.config)
    extend(decoder, cache, prompt)
    ask_tree(decoder, cache, tree, parents)
    path = path_to(parents, 6)
    cache.commit(path)
    extend(decoder, alone, torch.cat([prompt, tree[path]]), max_tokens=1)
    assert torch.equal(extend(decoder, cache, rest), extend(decoder, alone, rest, max_tokens=1))
