"""The private cache: growth, commits, truncation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.convert import load_config
from paceline.decoder import LocalCache


@pytest.fixture
def cache(models: dict[str, Path]) -> LocalCache:
    """Ten committed slots whose keys hold their slot number, and room for more."""
    cache = LocalCache(load_config(models["llama"]))
    key, value = cache.layer(1)
    key.copy_(torch.arange(cache.capacity)[None, :, None].expand_as(key))
    value.copy_(-key)
    cache.commit(range(10))
    return cache


def held(cache: LocalCache, count: int) -> list[int]:
    key, value = cache.layer(1)
    assert torch.equal(key, -value)
    return key[0, :count, 0].int().tolist()


def test_committing_a_path_compacts_it(cache: LocalCache) -> None:
    cache.commit([0, 3, 4, 9])
    assert len(cache) == 14
    assert held(cache, 14) == [*range(10), 10, 13, 14, 19]


def test_growth_keeps_what_is_committed(cache: LocalCache) -> None:
    before = cache.capacity
    cache.reserve(before)
    assert cache.capacity >= before + 10
    assert held(cache, 10) == list(range(10))


def test_truncation_forgets_the_end(cache: LocalCache) -> None:
    cache.truncate(4)
    assert len(cache) == 4
    with pytest.raises(ValueError, match="4 tokens are committed"):
        cache.truncate(5)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([1, 0], "strictly rising"),
        ([0, 0], "strictly rising"),
        ([-1], "strictly rising"),
        ([0, 1 << 20], "slots are reserved"),
    ],
)
def test_other_paths_are_refused(cache: LocalCache, path: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cache.commit(path)


def test_a_cache_grown_in_inference_mode_can_be_used_outside(cache: LocalCache) -> None:
    with torch.inference_mode():
        cache.reserve(cache.capacity)
    cache.commit([1, 2])
    assert len(cache) == 12
