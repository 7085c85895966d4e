"""The tree drafter with a small model, against dense references; its KV."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.drafter.methods.base import Budget, Update
from paceline.drafter.methods.lm import LmSequence

from .models import (
    SAMPLINGS,
    VOCAB,
    beam_search,
    check_tree,
    forward,
    load,
    start,
    text_of,
    write_model,
)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("widths", ["4,4,4", "2,5", "1,1,1,1", "1,1,3,2"])
def test_trees_equal_a_dense_beam_search(
    tmp_path_factory: pytest.TempPathFactory, family: str, name: str, widths: str
) -> None:
    folder = write_model(tmp_path_factory.mktemp("dense") / "model", family, seed=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    drafter = load(folder, widths=widths, min_survival="0", max_nodes="64")
    levels = [int(width) for width in widths.split(",")]
    for seed in range(2):
        text = text_of(37, seed)
        tree = start(drafter, text, SAMPLINGS[name]).draft(Budget(64, 64))

        def logits_after(path: tuple[int, ...], text: list[int] = text) -> torch.Tensor:
            with torch.inference_mode():
                logits: torch.Tensor = model(torch.tensor([[*text, *path]])).logits[0, -1]
            return logits

        expected = beam_search(text, SAMPLINGS[name], levels, logits_after)
        check_tree(tree, expected)


@pytest.mark.parametrize(("nodes", "depth"), [(1, 4), (5, 4), (16, 1), (16, 3), (7, 2)])
def test_a_node_budget_keeps_the_likeliest_nodes(folder: Path, nodes: int, depth: int) -> None:
    drafter = load(folder, min_survival="0")
    text = text_of(30)
    tree = start(drafter, text).draft(Budget(nodes, depth))
    tree.check(VOCAB)
    assert tree.depth <= depth
    whole = start(drafter, text).draft(Budget(16, depth))
    survivals = sorted((whole.survivals[node] for node in range(len(whole))), reverse=True)
    got = [tree.survivals[node] for node in range(len(tree))]
    assert got == sorted(got, reverse=True)
    assert got == pytest.approx(survivals[:nodes])
    siblings = [(p, t) for p, t in zip(tree.parents, tree.tokens, strict=True)]
    assert len(set(siblings)) == len(siblings)


def test_unlikely_nodes_are_not_expanded(folder: Path) -> None:
    tree = start(load(folder, min_survival="0.2"), text_of(30)).draft(Budget(16, 4))
    inner = {parent for parent in tree.parents if parent >= 0}
    assert all(tree.survivals[node] >= 0.2 for node in inner)
    none = start(load(folder, min_survival="1"), text_of(30)).draft(Budget(16, 4))
    assert none.depth == 1


def random_rounds(
    sequence: LmSequence, rounds: int, max_length: int, draws: random.Random
) -> Iterator[int]:
    """Rounds that accept some path or nothing; yields the number of drafted nodes kept."""
    while rounds > 0 and len(sequence.text) < max_length:
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
    _, expected = forward(drafter.decoder, sequence.text)
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
