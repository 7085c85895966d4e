"""Training of a target: its plan, its loss, its folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.train.blocks import plain_folder
from paceline.train.corpus import Corpus
from paceline.train.loop import Clock
from paceline.train.model import build_model, text_loss
from paceline.train.presets import LM_PRESETS, Preset, Stage
from paceline.train.run import Run
from paceline.train.target import train_target

MakeRun = Callable[..., Run]


def test_the_model_folder_is_what_transformers_reads(
    corpus: Corpus, preset: Preset, make_run: MakeRun, tmp_path: Path
) -> None:
    out = tmp_path / "target"
    trained = train_target(corpus, preset, make_run("run", steps=4), out)
    plain = plain_folder(out, tmp_path / "plain")
    assert {t.dtype for t in load_file(plain / "model.safetensors").values()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(plain)
    model = AutoModelForCausalLM.from_pretrained(plain)
    ids = torch.tensor([tokenizer.encode("def add_1(a, b):\n")])
    assert torch.equal(model(ids).logits, trained(ids).logits)
    assert model.config.max_position_embeddings == preset.context
    card = (out / "README.md").read_text()
    assert "| held-out files |" in card
    assert str(tmp_path) not in card
    assert len(json.loads((out / "corpus.json").read_text())["heldout"]) == 2


@pytest.mark.parametrize("preset", LM_PRESETS.values(), ids=list(LM_PRESETS))
def test_a_language_model_s_plan(preset: Preset) -> None:
    """Rates warm up, stay and fall; the last rows fill the context."""
    plan = preset.plan(minutes=10, steps=1000)
    assert plan.rate(0, 0.0) < 0.1
    assert plan.rate(300, 0.5) == 1
    falling = [plan.rate(900, share / 100) for share in range(50, 101, 10)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(0.03)
    assert sum(stage.share for stage in preset.stages) == pytest.approx(1)
    assert plan.documents(0.0) is None
    assert plan.documents(0.99) == (preset.focus_files if preset.stages[-1].focus else None)
    assert plan.shape(0.99)[1] == preset.context >= 4096


def test_a_pause_within_a_step_is_not_counted() -> None:
    clock = Clock()
    for _ in range(10):
        clock.add(1.0)
    clock.add(3600.0)
    assert clock.elapsed == pytest.approx(11)


def test_rows_longer_than_the_context_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Preset(**{**vars(LM_PRESETS["cpu"]), "stages": (Stage("long", 1.0, rows=1, length=8192),)})


def test_an_untrained_model_guesses_evenly(preset: Preset) -> None:
    model = build_model(preset, eos=0)
    assert text_loss(model, [list(range(200))], length=64) == pytest.approx(5.77, abs=0.3)
