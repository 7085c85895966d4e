"""Training under KV budgets: views of a prefix, and the losses of both kinds of drafter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.drafter.methods.longspec import LongSpecConfig, LongSpecModel, window_mask
from paceline.train.batches import Batches
from paceline.train.budget.lm import ContinuedLm, LmLoss
from paceline.train.budget.longspec import ContinuedLayer, LayerLoss, ObservedTarget
from paceline.train.budget.preset import BudgetPreset
from paceline.train.budget.views import Draw, chosen, full_view, sparse_view

SMALL = BudgetPreset(
    length=256, shortest_prefix=64, continuation=16, segments=4, minutes=60, steps=30,
    adamw_rate=6e-3, muon_rate=0.03, budgets=(8, 32, 96), weights=(0.5, 0.3, 0.2), warm_up=2,
    files=4, own_texts=2,
)  # fmt: skip


@given(prefix=st.integers(1, 30), budget=st.integers(8, 300), seed=st.integers(0, 99))
def test_chunks_are_chosen_by_attention(prefix: int, budget: int, seed: int) -> None:
    torch.manual_seed(seed)
    weights = torch.rand(8 * prefix)
    seen = chosen("chunk_topk", 8 * prefix, budget, weights)
    if budget >= 8 * prefix:
        assert seen.all()
        return
    chunks = seen.view(-1, 8)
    assert (chunks.all(1) == chunks.any(1)).all()
    assert int(seen.sum()) == budget // 8 * 8
    scores = weights.view(-1, 8).sum(1)
    assert scores[chunks[:, 0]].min() >= scores[~chunks[:, 0]].max()


def test_streaming_shows_the_first_and_the_newest() -> None:
    assert chosen("streaming", 64, 8, None).nonzero().flatten().tolist() == [
        0, 1, 2, 3, 60, 61, 62, 63,
    ]  # fmt: skip


def test_a_layer_sees_what_its_views_say(target: Path) -> None:
    """Equal to the dense module with masks, of the full prefix and of a budgeted one."""
    torch.manual_seed(0)
    config = LongSpecConfig.for_target(target, window=32)
    model = LongSpecModel(config)
    length, prefixes, count, lag = 128, [64, 100], 12, 3
    embedded = torch.randn(1, length, config.hidden)
    keys, values = torch.randn(2, config.kv_heads, length, config.head_dim)
    full = full_view(prefixes, count, length, lag)
    kept = [chosen("streaming", prefix, 16, None) for prefix in prefixes]
    views = torch.stack([full, sparse_view(full, prefixes, kept)])
    fed = torch.tensor(prefixes)[:, None] + torch.arange(-31, count)
    found = ContinuedLayer(model)(embedded[0][fed], fed, keys, values, views)
    for number, view in enumerate(views):
        for row, prefix in enumerate(prefixes):
            seen = torch.zeros(length, length, dtype=torch.bool)
            seen[prefix : prefix + count] = view[row]
            dense = model(
                embedded, torch.arange(length), window_mask(length, 32), keys[None], values[None],
                seen,
            )  # fmt: skip
            expected = dense[0, prefix : prefix + count]
            torch.testing.assert_close(found[number, row], expected, rtol=1e-4, atol=1e-4)
    hidden = ~views[1].any((0, 1))
    assert hidden[20:40].all()
    again = ContinuedLayer(model)(
        embedded[0][fed], fed, keys.masked_fill(hidden[:, None], 9.0), values, views
    )
    assert torch.equal(again[1], found[1])
    assert not torch.equal(again[0], found[0])


def test_an_lm_sees_what_its_views_say(drafters: dict[str, Path]) -> None:
    """Equal to one pass over the text with the same positions masked."""
    student, model = ContinuedLm(_hf(drafters["lm"])), _hf(drafters["lm"])
    length, prefix, count = 128, 64, 10
    tokens = torch.randint(1, 300, (length,))
    kv, weights = student.prefill(tokens)
    assert torch.allclose(weights[0].sum(), torch.tensor(2.0 * 2 * 64))  # layers, heads, queries
    full = full_view([prefix], 1, length, 1).expand(-1, count, -1)
    sparse = sparse_view(full, [prefix], [chosen("chunk_topk", prefix, 24, weights[0, :prefix])])
    fed = torch.arange(prefix, prefix + count)[None]
    for view in (full, sparse):
        found = student(tokens[fed], fed, kv, view)
        seen = torch.ones(prefix + count, prefix + count, dtype=torch.bool).tril()
        seen[prefix:, :prefix] = view[0, :, :prefix]
        mask = torch.zeros(1, 1, *seen.shape).masked_fill(~seen, -torch.inf)
        dense = model(tokens[None, : prefix + count], attention_mask=mask).logits[0, prefix:]
        torch.testing.assert_close(found[0], dense, rtol=1e-3, atol=1e-3)
    assert sparse[0, 0].sum() == 24


def test_attention_of_the_target_is_its_own(target: Path) -> None:
    """What the newest tokens of a prefix look at, as transformers computes it."""
    observed = ObservedTarget(target, "cpu", layer=1)
    tokens = torch.randint(1, 300, (1, 96))
    _, keys, _ = observed.read(tokens, torch.arange(96)[None])
    observed.model.set_attn_implementation("eager")
    seen = observed.model(tokens, output_attentions=True).attentions[1][0].float()
    expected = seen[:, 30:70, :70].sum((0, 1))
    torch.testing.assert_close(observed.weights(30, 70, keys[0]), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("budgets", [(8,), (8, 32, 96)])
def test_draws_follow_the_weights(budgets: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    preset = SMALL.with_budgets(budgets, ())
    draws = [Draw.of(preset) for _ in range(300)]
    for budget in budgets:
        share = sum(draw.budget == budget for draw in draws) / len(draws)
        assert share == pytest.approx(1 / len(budgets), abs=0.1)
    prefixes = {prefix for draw in draws for prefix in draw.prefixes}
    assert prefixes == {64, 128, 192}
    assert {draw.policy for draw in draws} == {"streaming", "chunk_topk"}


@pytest.mark.parametrize(
    "wrong", [{"budgets": (4,)}, {"weights": (1.0,)}, {"shortest_prefix": 250}]
)
def test_bad_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|do not fit"):
        replace(SMALL, **wrong)


def test_lambda_weighs_the_sparse_loss(drafters: dict[str, Path], target: Path) -> None:
    batches = Batches([torch.randint(1, 300, (1200,)).tolist()], separator=0)
    places = batches.next(1, SMALL.length)
    model = LongSpecModel(LongSpecConfig.for_target(target, window=32))
    observed = ObservedTarget(target, "cpu", 1)
    small = ContinuedLm(_hf(drafters["lm"]))

    def layer_loss(weight: float) -> Tensor:
        torch.manual_seed(3)
        preset = replace(SMALL, sparse_weight=weight)
        return LayerLoss(observed, 32, batches, preset)(ContinuedLayer(model), places, 0.0)

    def lm_loss(weight: float) -> Tensor:
        torch.manual_seed(3)
        preset = replace(SMALL, sparse_weight=weight)
        return LmLoss(observed.model, small, batches, preset)(small, places, 0.0)

    for loss in (layer_loss, lm_loss):
        none, half, whole = (loss(weight).item() for weight in (0.0, 0.5, 1.0))
        assert 0 < none < half < whole
        assert half == pytest.approx((none + whole) / 2, rel=1e-3)


def _hf(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
