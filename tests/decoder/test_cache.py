"""The private cache: growth, commits, truncation, recurrent states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoder_cases import ask_tree, extend, load, random_tokens, run

from paceline.convert import load_config
from paceline.decoder import LocalCache
from paceline.kernels import QueryBlock, plan_trees


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
    before = cache.capacity
    with torch.inference_mode():
        cache.reserve(before)
    assert cache.capacity >= before + 10
    cache.commit([1, 2])
    assert held(cache, 10) == list(range(10))
    assert len(cache) == 12


def test_a_pass_that_is_not_committed_changes_nothing(models: dict[str, Path]) -> None:
    """Trees and a prompt run, as if the step failed behind them; then the text goes on."""
    decoder, text = load(models, "qwen3-5"), random_tokens(40)
    cache = LocalCache(decoder.config)
    extend(decoder, cache, text[:20])
    for parents in ((-1, 0, 0, 2), (-1, -1, 1)):
        ask_tree(decoder, cache, text[: len(parents)], parents)
    cache.reserve(9)
    plan = plan_trees([QueryBlock(0, 20, None, 9, final=True)])
    decoder.forward(text[:9], plan, [cache], logit_rows=None)
    assert torch.equal(extend(decoder, cache, text[20:]), run(decoder, text)[20:])


def test_states_that_are_not_kept_are_named(models: dict[str, Path]) -> None:
    decoder = load(models, "qwen3-5")
    cache = LocalCache(decoder.config)
    for _ in range(3):
        extend(decoder, cache, random_tokens(9))
    cache.truncate(4)
    with pytest.raises(ValueError, match="no recurrent states of position 4 are kept"):
        extend(decoder, cache, random_tokens(1))
