"""The self-attention KV of the LongSpec drafter: its content and its memory."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafter.methods.base import Budget, Update
from paceline.drafter.methods.longspec import LongSpecConfig
from paceline.drafter.methods.longspec.drafter import LongSpecDrafter, LongSpecSequence
from paceline.drafter.methods.slots import WindowCache
from paceline.kernels import CHUNK

from .longspec_models import FakeKv, load, made_up_kv, start, write_longspec
from .models import VOCAB, text_of, write_model


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


def newest(cache: WindowCache) -> list[Tensor]:
    """Keys and values of the last window but one position."""
    begin = max(0, cache.length - cache.window + 1) - cache.base
    return [plane[:, begin : cache.length - cache.base] for plane in cache.layer(0)]


def test_a_sequence_takes_the_same_memory_at_1k_and_at_128k(target: Path, tmp_path: Path) -> None:
    drafter = make(target, tmp_path, 512)
    sizes = []
    for length in ((1 << 10) + 4, 1 << 17):  # more than what is read at once
        text = text_of(length)
        kv = endless_kv(drafter.layer.config)
        kv.committed = length - 1
        sequence = start(drafter, text, kv)
        while sequence.backlog:
            sequence.warm(256)
        for _ in range(3):
            tree = sequence.draft(Budget(16, 4))
            sequence.extend(Update(tree.path(0)))
        assert sequence.begin(Budget(16, 4))  # in the middle of a round
        its_own = {id(drafter), id(kv), kv.keys.data_ptr(), kv.values.data_ptr()}
        sizes.append(bytes_of(sequence, its_own))
    config = drafter.layer.config
    slots = 512 + CHUNK + drafter.options.drafted + drafter.options.context
    assert abs(sizes[0] - sizes[1]) < 1024  # dicts of a class's first objects are larger
    kv_bytes = 2 * 4 * slots * config.kv_heads * config.head_dim
    assert kv_bytes < sizes[0] < 1.2 * kv_bytes


def bytes_of(thing: Any, seen: set[int]) -> int:
    """Bytes of an object and what it refers to, without what was seen; 8 per token id."""
    if id(thing) in seen or thing is None or isinstance(thing, type):
        return 0
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        storage = thing.untyped_storage()
        if storage.data_ptr() in seen:  # the target's, or counted before
            return 0
        seen.add(storage.data_ptr())
        return storage.nbytes()
    if isinstance(thing, (int, float)):
        return 8
    size = sys.getsizeof(thing)
    if isinstance(thing, dict):
        return size + sum(bytes_of(each, seen) for each in thing.values())
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return size + sum(8 if isinstance(each, int) else bytes_of(each, seen) for each in thing)
    return size + bytes_of(getattr(thing, "__dict__", None), seen)
