"""KV of drafters: that of the text, and bounded; of ``lm`` whole, of ``longspec`` a window."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafter.methods.base import Budget, Update

from .models import (
    VOCAB,
    FakeKv,
    forward,
    load,
    made_up_kv,
    start,
    text_of,
    write_longspec,
    write_model,
)


def random_rounds(
    sequence: Any, rounds: int, draws: random.Random
) -> Iterator[tuple[list[int], int]]:
    """Rounds that accept some path or nothing; yields emitted tokens and drafted ones kept."""
    for _ in range(rounds):
        tree = sequence.draft(Budget(draws.randint(0, 16), draws.randint(0, 5)))
        new = [draws.randrange(VOCAB) for _ in range(draws.randint(0, 3))]
        if tree and draws.random() < 0.8:
            new = [*tree.path(draws.randrange(len(tree))), draws.randrange(VOCAB)]
        before = sequence.backlog + len(new)
        sequence.extend(Update(tuple(new)))
        kept = before - sequence.backlog
        if draws.random() < 0.2:
            sequence.warm(draws.randint(0, 4))
        yield new, kept


@pytest.mark.parametrize("widths", ["4,4,4,4", "1,1,1", "1,3,3", "8"])
def test_the_kv_stays_that_of_the_text(tmp_path: Path, widths: str) -> None:
    """Bit by bit, with the real decoder."""
    drafter = load("lm", write_model(tmp_path / "model"), widths=widths, min_survival=0)
    text = text_of(200)
    sequence, kept = start(drafter, text), 0
    for new, count in random_rounds(sequence, 80, random.Random(0)):
        text, kept = [*text, *new], kept + count
        assert sequence.tokens == text
    assert kept > 20 or widths != "1,1,1"  # nodes of other trees are fed again as text
    _, expected = forward(drafter.decoder, text)
    for layer in range(drafter.decoder.config.layers):
        for ours, theirs in zip(sequence.cache.layer(layer), expected.layer(layer), strict=True):
            assert torch.equal(ours[:, : sequence.cached], theirs[:, : sequence.cached])


def test_kv_beyond_the_limit_is_freed(folder: Path) -> None:
    drafter = load("lm", folder, kv_gib=0.001)
    assert drafter.kv_limit == 2**30 // 1000 // drafter.decoder.config.kv_bytes_per_token
    drafter.kv_limit = limit = 2048
    first, second = start(drafter, text_of(1000)), start(drafter, text_of(1500, 1))
    assert first.draft(Budget(16, 4))
    assert drafter.kv_slots == first.cache.capacity
    assert not second.draft(Budget(16, 4))
    second.extend(Update([1]))
    assert not second.draft(Budget(16, 4))
    assert 0 < drafter.kv_slots <= limit
    first.extend(Update([1]))
    assert first.draft(Budget(16, 4))
    first.close()
    second.close()
    assert drafter.kv_slots == 0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ring") / "target"
    return write_model(folder, max_position_embeddings=1 << 20)


def load_window(target: Path, folder: Path, window: int, **options: Any) -> Any:
    return load("longspec", write_longspec(folder, target, window=window), target, **options)


def endless_kv(drafter: Any, committed: int = 0) -> FakeKv:
    """KV of any length, with equal content at every position."""
    few = made_up_kv(drafter.shape, 1)
    shape = (few.keys.shape[0], 1 << 18, few.keys.shape[2])
    return FakeKv(few.keys.expand(shape), few.values.expand(shape), committed)


@pytest.mark.parametrize("window", [3, 64, 300])
def test_after_many_rounds_the_window_is_that_of_the_text(
    target: Path, tmp_path: Path, window: int
) -> None:
    """Bit by bit, in the memory that was allocated first."""
    drafter = load_window(target, tmp_path, window, widths="4,4,4,4", min_survival=0)
    kv, text = endless_kv(drafter), text_of(5)
    sequence = start(drafter, text, kv)
    keys, _ = sequence.cache.layer(0)
    place, size = keys.data_ptr(), keys.nbytes

    def check_window() -> None:
        """The newest window equals that of one pass over the text."""
        fresh = start(drafter, [*text[: sequence.cache.length], 0], endless_kv(drafter))
        fresh.warm(sequence.cache.length)
        caches = sequence.cache, fresh.cache
        for ours, theirs in zip(*map(newest, caches), strict=True):
            assert torch.equal(ours, theirs)

    for count, (new, _) in enumerate(random_rounds(sequence, 500, random.Random(window))):
        text += new
        kv.committed = min(len(text) - 1, 40)  # how much there is makes no difference here
        if count % 50 == 0:
            check_window()
    check_window()
    assert len(text) > 1000
    keys, _ = sequence.cache.layer(0)
    assert (keys.data_ptr(), keys.nbytes) == (place, size)
    assert sequence.draft(Budget(16, 4)) == start(drafter, text, kv).draft(Budget(16, 4))


def newest(cache: Any) -> list[Tensor]:
    """Keys and values of the last window but one position."""
    begin = max(0, cache.length - cache.window + 1) - cache.base
    return [plane[:, begin : cache.length - cache.base] for plane in cache.layer(0)]


def test_memory_does_not_depend_on_the_length_of_the_text(target: Path, tmp_path: Path) -> None:
    """Neither keys and values nor the text itself are kept beyond the window."""
    drafter, sizes = load_window(target, tmp_path, 512), []
    for length in ((1 << 10) + 4, 1 << 17):
        text, kv = text_of(length), endless_kv(drafter, length - 1)
        tracemalloc.start()
        sequence = start(drafter, text, kv)
        while sequence.backlog:
            sequence.warm(256)
        sequence.extend(Update(sequence.draft(Budget(16, 4)).path(0)))
        sizes.append((sequence.cache.layer(0)[0].nbytes, tracemalloc.get_traced_memory()[0]))
        tracemalloc.stop()
    assert sizes[0][0] == sizes[1][0]
    assert sizes[1][1] < sizes[0][1] + (1 << 17), "a byte a token is less than any copy of the text"
