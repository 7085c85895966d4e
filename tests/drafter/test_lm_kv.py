"""The KV cache of ``lm``: its content and its limit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.drafter.methods.base import Budget, Update
from paceline.drafter.methods.lm import LmSequence

from .models import VOCAB, forward, load, start, text_of, write_model


def random_rounds(
    sequence: LmSequence, rounds: int, most: int, draws: random.Random
) -> Iterator[int]:
    """Rounds that accept some path or nothing; yields the number of drafted nodes kept."""
    while rounds > 0 and len(sequence.text) < most:
        rounds -= 1
        tree = sequence.draft(Budget(draws.randint(0, 16), draws.randint(0, 5)))
        new = [draws.randrange(VOCAB) for _ in range(draws.randint(0, 3))]
        if tree and draws.random() < 0.8:
            new = [*tree.path(draws.randrange(len(tree))), draws.randrange(VOCAB)]
        text, before = [*sequence.text, *new], sequence.cached
        sequence.extend(Update(tuple(new)))
        assert sequence.text == text
        yield sequence.cached - before


@pytest.mark.bits
@pytest.mark.parametrize("widths", ["4,4,4,4", "1,1,1", "1,3,3", "8"])
def test_the_kv_stays_that_of_the_text(tmp_path: Path, widths: str) -> None:
    """Bit by bit, with the real decoder."""
    folder = write_model(tmp_path / "model")
    drafter = load(folder, widths=widths, min_survival="0")
    sequence = start(drafter, text_of(200))
    kept = sum(random_rounds(sequence, 80, 2000, random.Random(0)))
    assert kept > 20 or widths == "8"  # a tree of one level feeds no node
    _, expected = forward(drafter, sequence.text)
    for layer in range(drafter.decoder.config.layers):
        for ours, theirs in zip(sequence.cache.layer(layer), expected.layer(layer), strict=True):
            assert torch.equal(ours[:, : sequence.cached], theirs[:, : sequence.cached])


def test_kv_beyond_the_limit_is_freed(folder: Path) -> None:
    drafter = load(folder, kv_gib="0.001")
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
