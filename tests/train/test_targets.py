"""Training reads a target as services do, and checks it before anything is loaded."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_files import as_file

from paceline.decoder import Decoder
from paceline.harness import models
from paceline.train import cli, conversations
from paceline.train.conversations import OwnTexts, read_conversations
from paceline.train.recipes import recipes

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
DRAFTERS = ("dspark", "eagle3", "longspec", "mtp")
COMMANDS = {
    **{name: ["--preset", "smollm2"] for name in DRAFTERS},
    "own-text": ["--out", "own.jsonl"],
}


def train(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(words))


@pytest.mark.parametrize("layers", [2, 7, 18, 24, 28, 30, 80])
def test_the_presets_for_instruct_models_fit_targets_of_any_depth(
    layers: int, target: Path, folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Of 7 layers or more; others are refused before a text is written."""
    (target / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))

    def load(*args: object) -> None:
        raise AssertionError("texts are written")

    monkeypatch.setattr(OwnTexts, "load", load)
    monkeypatch.setattr(cli, "_HELDOUT_FILES", 2)
    for method, preset in (("dspark", "smollm2"), ("dspark", "shipped"), ("eagle3", "smollm2")):
        recipe = recipes()[method]
        fits = replace(recipe.presets[preset], draft_vocab_size=99)
        trainer = recipe.load_trainer(target, fits)
        if layers > 2:
            taps = trainer.new_drafter(0).config.taps
            assert taps == (2, layers // 2, layers - 3, layers - 1)
            continue
        words = [method, "--preset", preset, "--target", str(target), "--data", str(folder)]
        words += ["--vocabulary", "99", "--out", str(target / "out"), "--work", str(target / "w")]
        assert train(*words) == 1
        assert "expected strictly increasing" in capsys.readouterr().err


def test_help_says_what_holds_without_each_option() -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    [commands] = (each.choices for each in parser._actions if isinstance(each.choices, dict))
    assert {"own-text", *DRAFTERS} <= commands.keys()
    silent = [
        (name, action.dest)
        for name, command in commands.items()
        for action in command._actions
        if not action.required and action.nargs != 0 and "default: " not in str(action.help)
    ]
    assert not silent


@pytest.mark.parametrize("form", ["folder", "file", "name"])
def test_a_target_of_every_form_writes_conversations(
    form: str, target: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (target / "chat_template.jinja").write_text(TEMPLATE)
    given = str(target if form == "folder" else as_file(target))
    if form == "name":
        monkeypatch.setitem(
            models.MODELS, "tiny", models.NamedModel("t.gguf", ("a-package",), 1, "")
        )
        monkeypatch.setattr(models.NamedModel, "path", Path(given))
        given = "tiny"
    monkeypatch.setattr(cli, "_HELDOUT_FILES", 2)
    for name, value in {"_TOGETHER": 2, "_QUESTION": 6, "_ANSWER": 6}.items():
        monkeypatch.setattr(conversations, name, value)
    out = tmp_path / "own.jsonl"
    words = ["--data", str(folder), "--count", "1", "--out", str(out), "--kinds", "chat"]
    assert train("own-text", "--target", given, *words) == 0
    assert read_conversations(out)


@pytest.mark.parametrize("lacks", ["model", "tokenizer", "template"])
def test_a_target_that_does_not_fit_is_refused_before_it_is_loaded(
    lacks: str, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*args: object) -> None:
        raise AssertionError("the target is loaded")

    monkeypatch.setattr(Decoder, "__init__", load)
    monkeypatch.setattr(cli, "_corpus", load)
    if lacks == "tokenizer":
        for file in target.glob("tokenizer*"):
            file.unlink()
    given = target.with_name("none") if lacks == "model" else target
    expected = {"model": "config.json", "tokenizer": "no tokenizer", "template": "chat template"}
    for command, options in COMMANDS.items():
        assert train(command, "--target", str(given), "--out", "out", *options) == 1
        assert expected[lacks] in capsys.readouterr().err


def test_the_paper_s_arm_of_dspark_differs_in_what_the_paper_says() -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    presets = []
    for words in ([], ["--as-paper"]):
        args = parser.parse_args(["dspark", "--preset", "smollm2", *words])
        presets.append(vars(args.recipe.vary(args.recipe.presets[args.preset], args)))
    ours, paper = presets
    differing = {name: paper[name] for name in paper if paper[name] != ours[name]}
    assert differing == {"state_input": False, "ce": 0.1, "tv": 0.9, "certainty": 1.0}
