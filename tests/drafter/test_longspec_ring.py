"""The ring of the LongSpec drafter: its content, its mask, its memory."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.drafter.methods.base import Budget, Update
from paceline.drafter.methods.longspec import LongSpecConfig
from paceline.drafter.methods.longspec.drafter import LongSpecDrafter, LongSpecSequence
from paceline.drafter.methods.longspec.layer import ring_mask
from paceline.drafter.methods.slots import ring_slots

from .longspec_models import FakeKv, load, made_up_kv, start, write_longspec
from .models import VOCAB, text_of, write_model


@given(data=st.data())
def test_masks_show_the_window_along_each_path(data: Any) -> None:
    """Against a map of slots to positions after a text was written in arbitrary parts."""
    window = data.draw(st.integers(1, 12), label="window")
    lies: dict[int, int] = {}
    length = data.draw(st.integers(1, 40), label="length")
    written = 0
    while written < length:
        begin = max(written, length - window)
        end = data.draw(st.integers(begin + 1, length), label="written to")
        slots = [slot + i for slot, count in ring_slots(begin, end, window) for i in range(count)]
        lies |= dict(zip(slots, range(begin, end), strict=True))
        written = end
    draws = data.draw(st.lists(st.integers(0, 99), max_size=10), label="tree")
    paths: list[tuple[int, ...]] = [()]
    for node, draw in enumerate(draws):
        paths.append((*paths[draw % len(paths)], node))

    level = data.draw(st.sampled_from(sorted({len(path) for path in paths})), label="level")
    asked = [path for path in paths if len(path) == level]
    position = length - 1 + level
    mask = ring_mask(window, position, length, asked)
    for row, path in zip(mask.tolist(), asked, strict=True):
        seen = [slot for slot, bias in enumerate(row) if bias == 0.0]
        assert {*seen} | {slot for slot, bias in enumerate(row) if bias == -torch.inf} == {
            *range(len(row))
        }
        in_text = sorted(lies[slot] for slot in seen if slot < window)
        in_tree = [slot - window for slot in seen if slot >= window]
        places = [*in_text, *(length - 1 + len(paths[node + 1]) for node in in_tree)]
        assert places == list(range(max(0, position - window + 1), position + 1))
        assert tuple(in_tree) == path[-window:]


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


@pytest.mark.parametrize("window", [3, 8, 64])
def test_after_many_rounds_the_ring_is_that_of_the_text(
    target: Path, tmp_path: Path, window: int
) -> None:
    """Bit by bit, in the memory that was allocated first."""
    drafter = make(target, tmp_path, window, widths="4,4,4,4", min_survival="0")
    kv = endless_kv(drafter.layer.config)
    text = text_of(5)
    sequence = start(drafter, text, kv)
    place, size = sequence.ring.layer(0)[0].data_ptr(), sequence.ring.nbytes
    for count, new in enumerate(random_rounds(sequence, 500, random.Random(window))):
        text += new
        if count % 100 == 0:
            check_ring(drafter, sequence, text)
    check_ring(drafter, sequence, text)
    assert len(text) > 10 * window
    assert (sequence.ring.layer(0)[0].data_ptr(), sequence.ring.nbytes) == (place, size)
    kv.committed = 40
    assert sequence.draft(Budget(16, 4)) == start(drafter, text, kv).draft(Budget(16, 4))


def check_ring(drafter: LongSpecDrafter, sequence: LongSpecSequence, text: list[int]) -> None:
    """The ring equals that of one pass over the text."""
    written = sequence.ring.length
    fresh = start(drafter, [*text[:written], 0], endless_kv(drafter.layer.config))
    fresh.warm(written)
    window = sequence.ring.window
    slots = [p % window for p in range(max(0, written - window + 1), written)]
    for ours, theirs in zip(sequence.ring.layer(0), fresh.ring.layer(0), strict=True):
        assert torch.equal(ours[:, slots], theirs[:, slots])


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
    slots = 512 + drafter.options.drafted
    assert sizes[0] == sizes[1]
    ring = 2 * 4 * slots * config.kv_heads * config.head_dim
    assert ring < sizes[0] < 1.2 * ring


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
