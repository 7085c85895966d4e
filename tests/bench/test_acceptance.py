"""`paceline bench acceptance`: figures of drafters along the same answers."""

import argparse
import json
from pathlib import Path

import pytest

from paceline.bench.acceptance import run
from paceline.bench.cli import add_arguments

_DEMO = Path("models/demo")


def test_drafters_are_measured_on_the_same_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text(json.dumps({"text": "def add(a, b):\n    return"}) + "\n")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    twice = [f"{name}=lm:{_DEMO / 'lm'},widths=2,2" for name in ("first", "second")]
    words = ["acceptance", "--models", _DEMO, "--weights", "bfloat16", "--tokens", "24"]
    words += ["--prompts", prompts, "--output", tmp_path / "found.json", "--temperature", "0"]
    words += [word for spec in twice for word in ("--drafter", spec)]
    assert run(parser.parse_args([str(word) for word in words])) == 0
    [(title, entry)] = json.loads((tmp_path / "found.json").read_text())["results"].items()
    assert title == "mine, T = 0, bfloat16"
    assert entry["drafters"]["first"] == entry["drafters"]["second"]
    assert entry["drafters"]["first"]["accepted_length"] >= 1
    assert "second" in capsys.readouterr().out
