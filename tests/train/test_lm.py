"""Training of a small language model under KV budgets (BudgetDraft)."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from paceline.convert import load_decoder
from paceline.drafter import Resources
from paceline.drafter.methods.lm import OBSERVED, LmDrafter
from paceline.train.corpus import Corpus
from paceline.train.lm import BudgetLoss, LmTrainer, TrainedModel, likeliest
from paceline.train.model import load_model
from paceline.train.recipes.lm import LM_PRESETS
from paceline.train.run import Run

PREFIX, NEW, BUDGET = 90, 8, 24
PRESET = replace(
    LM_PRESETS["cpu"], prefix=PREFIX, continuation=NEW, budgets=(16, BUDGET), rank=2, warm_up=1
)


def dense(folder: Path) -> Any:
    model = load_model(folder, torch.float32)
    model.set_attn_implementation("eager")
    return model


def test_the_loss_is_the_papers(target: Path) -> None:
    """Both branches on all tokens of the continuation, with real positions and the target's
    likeliest tokens; the sparse one sees the chunks with the most attention."""
    torch.manual_seed(3)
    text, model = torch.randint(1, 60, (PREFIX + NEW,)), dense(target)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    decoder = load_decoder(target, "float32")
    wanted = likeliest(decoder, text, PREFIX)
    assert wanted.equal(dense(target)(text[None]).logits[0, PREFIX:].argmax(-1))
    seen = model(text[None, :PREFIX], output_attentions=True).attentions
    weights = sum(layer[0, :, -OBSERVED:].sum((0, 1)) for layer in seen)
    whole, rest = PREFIX // 8, PREFIX % 8
    best = weights[: 8 * whole].view(whole, 8).sum(1).topk((BUDGET - rest) // 8).indices
    kept = torch.zeros(PREFIX, dtype=torch.bool)
    kept[8 * whole :] = True
    kept.view(-1)[: 8 * whole].view(whole, 8)[best] = True
    losses = []
    for shown in (torch.ones(PREFIX, dtype=torch.bool), kept):
        visible = torch.ones(len(text), len(text), dtype=torch.bool).tril()
        visible[PREFIX:, :PREFIX] = shown
        mask = torch.zeros(1, 1, *visible.shape).masked_fill(~visible, -torch.inf)
        logits = model(text[None], attention_mask=mask).logits[0, PREFIX:]
        losses.append(F.cross_entropy(logits, wanted))
    trained = TrainedModel(model, rank=2)
    found = BudgetLoss(trained, decoder, text, PRESET).of_text(trained, text, BUDGET)
    torch.testing.assert_close(found, losses[0] + 0.5 * losses[1])
    assert abs(float(losses[0] - losses[1])) > 1e-3
    found.backward()
    changed = [name for name, each in trained.named_parameters() if each.grad.abs().max() > 0]
    assert changed
    assert all(name.endswith(".up") for name in changed), "updates begin at 0, and nothing else"


def test_budgets_are_drawn_as_in_the_paper() -> None:
    expected = {256: 0.4, 512: 0.3, 1024: 0.2, 2048: 0.1}
    assert LM_PRESETS["paper"].budget_weights == pytest.approx(expected)
    for wrong in ((), (4,), (16, PREFIX)):
        with pytest.raises(ValueError, match="expected at least one, from 8 on and below"):
            replace(PRESET, budgets=wrong)
    for fields in ({"rank": -1}, {"adamw_rate": 0.0}, {"adamw_rate": math.nan}):
        with pytest.raises(ValueError, match="expected 0 or more, and a finite one above 0"):
            replace(PRESET, **fields)


@pytest.mark.parametrize("rank", [2, 0])
def test_a_trained_model_is_a_drafter_and_a_run_goes_on(
    rank: int, target: Path, corpus: Corpus, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    preset = replace(PRESET, rank=rank, adamw_rate=0.01)
    trainer, out = LmTrainer(target, preset), tmp_path / "out"
    trainer.train(corpus, make_run("run", 2), out, target)
    weights = dense_weights(out)
    options = {"context": "16", "keep": "budget"}
    assert LmDrafter.load(out, options, Resources()).fit.tokenizer_digest
    assert "positions" in (out / "README.md").read_text()
    before = dense_weights(target)
    differing = {name for name, tensor in weights.items() if not tensor.equal(before[name])}
    assert differing
    if not rank:
        return  # a run goes on in the same way
    trainer.train(corpus, replace(make_run("run", 2), force=True), out, target)
    assert all(tensor.equal(weights[name]) for name, tensor in dense_weights(out).items())
    with pytest.raises(ValueError, match="holds another run"):
        LmTrainer(target, replace(preset, prefix=80)).train(
            corpus, replace(make_run("run", 2), force=True), out, target
        )


def dense_weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(dense(folder).state_dict())
