"""Paths in arguments: the home folder, and one way to name models, drafters and files."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_files import write_gguf

from paceline.cli.main import COMMANDS, build_parser, main
from paceline.harness.models import drafter_spec
from paceline.service.options import read_token

from .conftest import write_for_gguf

PLACES = ("DIR", "FILE", "PEM", "PATH", "MODEL", "FOLDER")
"""What arguments with a path call it in their help."""


def actions(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[argparse.ArgumentParser, argparse.Action]]:
    """All arguments of a parser and of its commands, each with its parser."""
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for nested in {id(each): each for each in action.choices.values()}.values():
                yield from actions(nested)
        else:
            yield parser, action


def test_every_argument_with_a_path_expands_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").touch()
    found = 0
    for parser, action in actions(build_parser(COMMANDS)):
        if action.nargs == 0 or action.dest == "config":  # which is expanded before it is parsed
            continue
        if action.metavar in PLACES or action.type is Path:
            value = parser._get_value(action, "~/x")
            assert str(value) == str(tmp_path / "x"), (parser.prog, action.option_strings)
            found += 1
        elif action.type is drafter_spec:
            value = parser._get_value(action, "a=lm:~/x,target=~/x")
            assert value == f"a=lm:{tmp_path}/x,target={tmp_path}/x"
            found += 1
    assert found > 30


def test_so_do_config_files_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.toml").write_text('[verifier]\ntarget = "~/missing"\n')
    with pytest.raises(SystemExit):
        main(["serve", "--config", "~/own.toml"])
    assert "there is no model at ~/missing" in capsys.readouterr().err
    (tmp_path / "token").write_text("secret")
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    monkeypatch.setenv("PACELINE_TOKEN_FILE", "~/token")
    assert read_token(None) == "secret"


def test_a_drafter_without_a_method_is_advised() -> None:
    for text in ("models/demo/lm", "smollm2", "own=smollm2,weights=int8", "~/x"):
        with pytest.raises(argparse.ArgumentTypeError, match="no method: give lm:"):
            drafter_spec(text)
    for text in ("ngram", "own=ngram,shared_tokens=0", "lm:models/demo/lm"):
        assert drafter_spec(text) == text


def test_a_small_model_is_inspected_as_file_and_as_folder(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_for_gguf("small", tmp_path / "own")
    write_gguf(tmp_path / "own.gguf", folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~/own", "~/own.gguf"):
        assert main(["drafters", "inspect", path, "--target", path]) == 0
        assert f"a model for lm: lm:{tmp_path}/own" in capsys.readouterr().out.replace("\n", "")
    demo = ["drafters", "inspect", "models/demo/lm", "--target", "models/demo/target"]
    assert main(demo) == 0
    assert "the tokenizers agree" in capsys.readouterr().out
    assert main([*demo[:-1], str(target)]) == 1
    assert "the tokenizers differ" in capsys.readouterr().out
