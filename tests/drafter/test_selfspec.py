"""The target drafting for itself, against the dense target with the same positions hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.convert import weights_fingerprint
from paceline.drafter.methods.base import Budget, GenerationInfo, Update
from paceline.drafter.methods.selfspec import MAX_NEW_TOKENS, SelfSpecDrafter, SelfSpecSequence
from paceline.kernels import streaming

from . import models
from .models import GREEDY, VOCAB, greedy, recorded_kv, text_of, write_model


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target") / "target", request.param, 3)


def load(folder: Path, **options: Any) -> SelfSpecDrafter:
    drafter: SelfSpecDrafter = models.load("selfspec", folder, **options)
    return drafter


def start(drafter: SelfSpecDrafter, text: list[int], committed: int) -> SelfSpecSequence:
    kv = recorded_kv(drafter.decoder, text, committed)
    sequence: SelfSpecSequence = models.start(drafter, text, kv)
    return sequence


def sparse_text(folder: Path, text: list[int], known: int, budget: int, count: int) -> list[int]:
    """The target's own tokens if those from ``known`` on see few positions before it."""
    seen = [position for part in streaming(known, budget) for position in part]
    return greedy(folder, text, [(known, seen)], count)


@pytest.mark.parametrize(("budget", "behind"), [(0, 1), (12, 1), (12, 7), (30, 20)])
def test_a_chain_is_the_sparse_targets_own_text(folder: Path, budget: int, behind: int) -> None:
    text = text_of(60, 4)
    drafter = load(folder, context=budget, depth=5, min_survival=0)
    sequence = start(drafter, text, len(text) - behind)
    tree = sequence.draft(Budget(8, 8))
    assert tree.parents == (-1, 0, 1, 2, 3)
    assert list(tree.tokens) == sparse_text(folder, text, len(text) - behind, budget, 5)
    sequence.extend(Update(tree.tokens[:2]))
    again = sequence.draft(Budget(8, 3))
    longer = [*text, *tree.tokens[:2]]
    assert list(again.tokens) == sparse_text(folder, longer, len(text) - behind, budget, 3)
    sequence.close()


def test_a_chain_ends_where_its_survival_is_small(folder: Path) -> None:
    text = text_of(60, 4)
    whole = start(load(folder, depth=8, min_survival=0), text, 59).draft(Budget(8, 8))
    assert len(whole) == 8
    for least in (0.5, whole.survivals[2]):
        drafter = load(folder, depth=8, min_survival=least)
        for _ in range(2):  # what was accepted before changes neither length nor confidences
            sequence = start(drafter, text, 59)
            cut = sequence.draft(Budget(8, 8))
            assert len(cut) == 1 + sum(each >= least for each in whole.survivals[:-1])
            assert cut.confidences == whole.confidences[: len(cut)]
            sequence.extend(Update(whole.tokens[: len(cut)]))


def test_nothing_is_drafted_without_kv_or_far_behind_it(folder: Path) -> None:
    drafter = load(folder)
    assert drafter.needs.kv_layers == tuple(range(drafter.decoder.config.layers))
    assert drafter.fit.target_fingerprint == weights_fingerprint(folder)
    text = text_of(MAX_NEW_TOKENS + 40, 1)
    assert not len(start(drafter, text, 0).draft(Budget(5, 5)))
    assert not len(start(drafter, text, 39).draft(Budget(5, 5)))
    assert len(start(drafter, text, 41).draft(Budget(5, 5)))
    with pytest.raises(ValueError, match="has none"):
        drafter.start(GenerationInfo(text, len(text), VOCAB, GREEDY))


def test_the_budget_may_be_a_share_of_the_text(folder: Path) -> None:
    needs = load(folder, context=12, ratio=0.25).needs
    assert [needs.kv_budget_at(length) for length in (1, 48, 49, 400)] == [12, 12, 13, 100]
    assert load(folder, context=0, ratio=0.25).needs.kv_budget_at(400) == 0, "all"
    text = text_of(60, 4)
    for ratio, seen in ((0.25, 15), (0.5, 30)):
        drafted = start(load(folder, context=8, ratio=ratio), text, 59).draft(Budget(8, 8))
        fixed = start(load(folder, context=seen), text, 59).draft(Budget(8, 8))
        assert drafted.tokens == fixed.tokens


def test_shared_weights_take_no_memory(folder: Path) -> None:
    assert not load(folder, share_weights="always").weight_bytes
    assert load(folder, share_weights="auto").weight_bytes > 0
