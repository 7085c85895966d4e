"""Training of a small language model under KV budgets (BudgetDraft)."""

import json
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
from paceline.train.acceptance import accepted_per_round, replay
from paceline.train.corpus import Corpus, encode_all, load_tokenizer
from paceline.train.lm import BudgetLoss, LmTrainer, TrainedModel, greedy_texts
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
    """Both branches on all tokens of the continuation, with real positions; the sparse one sees the
    chunks with the most attention."""
    torch.manual_seed(3)
    whole_text, model = torch.randint(1, 60, (PREFIX + 1 + NEW,)), dense(target)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    text, wanted = whole_text[:-1], whole_text[PREFIX + 1 :]
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
    found = BudgetLoss(trained, whole_text, PRESET).of_text(trained, whole_text, BUDGET)
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
    with pytest.raises(ValueError, match="--consistency is nan"):
        replace(PRESET, consistency=math.nan)
    for fields in ({"rank": -1}, {"adamw_rate": 0.0}, {"adamw_rate": math.nan}):
        with pytest.raises(ValueError, match="expected 0 or more, and a finite one above 0"):
            replace(PRESET, **fields)


def test_texts_are_the_targets_likeliest_and_written_once(
    target: Path, corpus: Corpus, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """A run goes on with those that it began with, also where another one has written more."""
    documents = encode_all(load_tokenizer(target), corpus.train)
    decoder, file = load_decoder(target, "float32"), tmp_path / "texts.json"

    def texts(run: str, count: int, minutes: float = 60) -> list[list[int]]:
        preset = replace(PRESET, texts=count)
        (tmp_path / run).mkdir(exist_ok=True)
        limited = make_run(run, 2, minutes=minutes)
        return greedy_texts(decoder, lambda: documents, preset, file, limited)

    few = texts("few", 2)
    for text in few:
        assert len(text) == PREFIX + 1 + NEW
        piece = text[:PREFIX]
        assert any(piece == ids[at : at + PREFIX] for ids in documents for at in range(len(ids)))
        likeliest = dense(target)(torch.tensor([text])).logits[0].argmax(-1)
        assert likeliest[PREFIX - 1 : -1].tolist() == text[PREFIX:]
    lines = file.read_text().splitlines()
    assert texts("late", 3, minutes=1e-9) == few, "none begins when the time is over"
    more = texts("more", 3)
    assert more[:2] == few == texts("few", 3)
    assert file.read_text().splitlines()[:2] == lines
    assert texts("other", 1) == few[:1] == texts("other", 2)


@pytest.mark.slow
def test_a_trained_model_drafts_better_under_a_budget(
    corpus: Corpus, make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along the texts that it learnt, by updates of low rank beside weights in bfloat16."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target, small, out = Path("models/demo/target"), Path("models/demo/lm"), tmp_path / "out"
    preset = replace(PRESET, rank=8, adamw_rate=0.01, texts=2, consistency=1.0, continuation=31)
    trainer, run = LmTrainer(target, preset), make_run("run", 40, bf16=True, card=False)
    trainer.train(corpus, run, out, small)
    training = json.loads((out / "config.json").read_text())["paceline"]["training"]
    assert (training["consistency"], training["texts"]) == (1.0, 2)
    [file] = (tmp_path / "cache/paceline/texts").iterdir()
    options = {"widths": "1", "depth": "4", "min_survival": "0", "keep": "budget", "context": "16"}
    decoder = load_decoder(target, "int8")
    texts = [json.loads(line) for line in file.read_text().splitlines()]
    known = [replay(decoder, text[:PREFIX], text[PREFIX:]) for text in texts]
    accepted = [
        sum(n for text in known for n in accepted_per_round(drafter, text))
        for drafter in (LmDrafter.load(folder, options, Resources()) for folder in (small, out))
    ]
    assert accepted[1] > accepted[0]
    with pytest.raises(ValueError, match="holds another run"):
        LmTrainer(target, replace(preset, prefix=80)).train(
            corpus, replace(run, force=True), out, small
        )
