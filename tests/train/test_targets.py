"""Training reads a target as services do, and checks it before anything is loaded."""

import argparse
from pathlib import Path

import pytest
from gguf_files import as_file

from paceline.decoder import Decoder
from paceline.harness import models
from paceline.train import cli, conversations
from paceline.train.conversations import read_conversations

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
