"""The LongSpec drafter against dense references; the content and the size of its KV."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafter.methods.base import Budget, Update
from paceline.drafter.methods.longspec import LongSpecConfig
from paceline.drafter.methods.longspec.drafter import LongSpecDrafter, LongSpecSequence
from paceline.drafter.methods.slots import WindowCache

from .longspec_models import (
    Dense,
    FakeKv,
    load,
    made_up_kv,
    start,
    target_kv,
    write_longspec,
)
from .models import GREEDY, SAMPLINGS, VOCAB, check_tree, text_of, write_model

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
TARGETS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "last layer": ("llama", {}, {}),
    "window": ("llama", {}, {"window": 16}),
    "first layer, tied": ("llama", {"tie_word_embeddings": True}, {"layer": 0, "window": 5}),
    "no final norm": ("llama", {}, {"final_norm": False, "window": 1, "intermediate": 48}),
    "reduced vocabulary": ("llama", {}, {"draft_vocab_size": 40}),
    "yarn": ("qwen3", {"rope_parameters": {"rope_theta": 1e4, **_YARN}}, {"window": 30}),
    "llama3": ("llama", {"rope_parameters": {"rope_theta": 1e4, **_LLAMA3}}, {"window": 30}),
}


def write_pair(folder: Path, name: str, seed: int = 1) -> tuple[Path, Path]:
    """A target and a drafter for it."""
    family, shape, layer = TARGETS[name]
    target = write_model(folder / "target", family, seed, **shape)
    return write_longspec(folder / "drafter", target, seed, **layer), target


@pytest.fixture(scope="module", params=TARGETS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_pair(tmp_path_factory.mktemp("longspec"), request.param)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("longspec"), "window")


@pytest.mark.parametrize(
    ("widths", "context"), [("4,4,4", 0), ("2,5", 1024), ("1,1,1,1", 5), ("1,3,2", 20)]
)
def test_trees_equal_a_dense_beam_search(
    pair: tuple[Path, Path], widths: str, context: int
) -> None:
    """On the target's KV, with all samplings, for texts shorter and longer than the window."""
    drafter = load(*pair, widths=widths, min_survival="0", max_nodes="64", context=str(context))
    dense = Dense(*pair, context)
    levels = [int(width) for width in widths.split(",")]
    for seed, (length, sampling) in enumerate(zip((1, 4, 17, 40, 90), SAMPLINGS, strict=True)):
        text = text_of(length, seed)
        kv = target_kv(pair[1], dense.config, text)
        tree = start(drafter, text, kv, SAMPLINGS[sampling]).draft(Budget(64, 64))
        expected = dense.tree(text, kv, SAMPLINGS[sampling], levels)
        check_tree(tree, expected)


def test_the_budget_may_change_between_rounds(small: tuple[Path, Path]) -> None:
    drafter = load(*small, widths="2,2", min_survival="0", max_nodes="64")
    dense, text = Dense(*small, 0), text_of(60, 3)
    kv = target_kv(small[1], dense.config, [*text, 5, 6, 7])
    kv.committed = len(text) - 1
    sequence = start(drafter, text, kv)
    for token, budget in ((5, 8), (6, 40), (7, 0)):
        drafter.options, dense.context = replace(drafter.options, context=budget), budget
        tree = sequence.draft(Budget(64, 64))
        expected = dense.tree(text, kv, GREEDY, [2, 2])
        check_tree(tree, expected)
        text.append(token)
        kv.committed += 1
        sequence.extend(Update([token]))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ring") / "target", **_LONG)


_LONG = {"max_position_embeddings": 1 << 20}


def make(target: Path, folder: Path, window: int, **options: str) -> LongSpecDrafter:
    return load(write_longspec(folder, target, window=window), target, **options)


def endless_kv(config: LongSpecConfig) -> FakeKv:
    """KV of any length, with equal content at every position."""
    few = made_up_kv(config, 1)
    shape = (config.kv_heads, 1 << 18, config.head_dim)
    return FakeKv(few.keys.expand(shape), few.values.expand(shape), 0)


def random_rounds(
    sequence: LongSpecSequence, rounds: int, draws: random.Random
) -> Iterator[list[int]]:
    """Rounds that accept some path or nothing; yields the emitted tokens."""
    kv = sequence.kv
    assert isinstance(kv, FakeKv)
    for _ in range(rounds):
        kv.committed = min(sequence.length - 1, 40)  # how much there is makes no difference here
        tree = sequence.draft(Budget(draws.randint(0, 16), draws.randint(0, 5)))
        new = [draws.randrange(VOCAB) for _ in range(draws.randint(0, 3))]
        if tree and draws.random() < 0.8:
            new = [*tree.path(draws.randrange(len(tree))), draws.randrange(VOCAB)]
        sequence.extend(Update(tuple(new)))
        if draws.random() < 0.2:
            sequence.warm(draws.randint(0, 4))
        yield new


@pytest.mark.bits
@pytest.mark.parametrize("window", [3, 64, 300])
def test_after_many_rounds_the_cache_is_that_of_the_text(
    target: Path, tmp_path: Path, window: int
) -> None:
    """Bit by bit, in the memory that was allocated first."""
    drafter = make(target, tmp_path, window, widths="4,4,4,4", min_survival="0")
    kv = endless_kv(drafter.layer.config)
    text = text_of(5)
    sequence = start(drafter, text, kv)
    place, size = sequence.cache.layer(0)[0].data_ptr(), sequence.cache.nbytes
    for count, new in enumerate(random_rounds(sequence, 500, random.Random(window))):
        text += new
        if count % 50 == 0:
            check_window(drafter, sequence, text)
    check_window(drafter, sequence, text)
    assert len(text) > 1000
    assert (sequence.cache.layer(0)[0].data_ptr(), sequence.cache.nbytes) == (place, size)
    kv.committed = 40
    assert sequence.draft(Budget(16, 4)) == start(drafter, text, kv).draft(Budget(16, 4))


def check_window(drafter: LongSpecDrafter, sequence: LongSpecSequence, text: list[int]) -> None:
    """The newest window equals that of one pass over the text."""
    fresh = start(drafter, [*text[: sequence.cache.length], 0], endless_kv(drafter.layer.config))
    fresh.warm(sequence.cache.length)
    for ours, theirs in zip(newest(sequence.cache), newest(fresh.cache), strict=True):
        assert torch.equal(ours, theirs)


def test_memory_does_not_depend_on_the_length_of_the_text(target: Path, tmp_path: Path) -> None:
    """Neither keys and values nor the text itself are kept beyond the window."""
    drafter, sizes = make(target, tmp_path, 512), []
    for length in ((1 << 10) + 4, 1 << 17):
        text, kv = text_of(length), endless_kv(drafter.layer.config)
        kv.committed = length - 1
        tracemalloc.start()
        sequence = start(drafter, text, kv)
        while sequence.backlog:
            sequence.warm(256)
        sequence.extend(Update(sequence.draft(Budget(16, 4)).path(0)))
        sizes.append((sequence.cache.nbytes, tracemalloc.get_traced_memory()[0]))
        tracemalloc.stop()
    assert sizes[0][0] == sizes[1][0]
    assert sizes[1][1] < sizes[0][1] + (1 << 17), "a byte a token is less than any copy of the text"


def newest(cache: WindowCache) -> list[Tensor]:
    """Keys and values of the last window but one position."""
    begin = max(0, cache.length - cache.window + 1) - cache.base
    return [plane[:, begin : cache.length - cache.base] for plane in cache.layer(0)]
