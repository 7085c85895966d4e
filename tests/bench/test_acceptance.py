"""`paceline bench acceptance`: figures of drafters along the same answers."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import pytest

from paceline.bench.acceptance import Acceptance, run
from paceline.bench.cli import add_arguments

_DEMO = Path("models/demo")


def test_figures_count_the_bonus_token_and_what_the_vocabulary_loses() -> None:
    entry = Acceptance(Counter({0: 2, 1: 1, 3: 1}), outside=1).entry()
    assert entry == {
        "rounds": 4, "accepted_length": 2.0, "positions": [0.5, 0.25, 0.25],
        "outside_vocabulary": 0.25,
    }  # fmt: skip


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
