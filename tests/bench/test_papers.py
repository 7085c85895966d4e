"""`paceline bench papers`: each experiment on the demo models, with the smallest limits."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Self

import pytest

from paceline.bench import papers
from paceline.bench.cli import add_arguments
from paceline.bench.papers import EXPERIMENTS, estimate, figures, run
from paceline.bench.table.engines import Answer, AnswerRequest

_DEMO = Path("models/demo")
_CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n"
_LIMITS = "--weights bfloat16 --texts 2 --tokens 16 --contexts 96"
_DSPARK = f"--drafter dspark=dspark:{_DEMO}/dspark,target={_DEMO}/target"
_OPTIONS = {
    "context": f"{_DSPARK} --drafter n=ngram --speed",
    "attention": "--rows 3",
    "dspark": _DSPARK,
    "load": f"{_DSPARK} --users 2",
    "selection": "--policies streaming verified --ratios 0.3 --contexts 1100 --texts 1",
}


class Services:
    """Answers at once, as services would."""

    def __init__(self, _target: Path, _weights: str, specs: Any, **more: Any) -> None:
        always = more.get("always")
        self.modes = [f"{each} always" for each in specs] if always else ["none", *specs]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def answer(self, mode: str, request: AnswerRequest) -> Answer:
        return Answer(request.tokens, 1.0, 2.0, 0.1, "", 4, 8, 2.0, 6.0, 12, 4)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_has_figures_of_every_arm(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(papers, "PacelineServices", Services)
    monkeypatch.setattr(sys, "argv", ["paceline", "bench", "papers", experiment])
    texts = tmp_path / "mine.jsonl"
    texts.write_text(f"{json.dumps({'text': _CODE})}\n" * 3)
    file = tmp_path / "found.json"
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["papers", experiment, "--models", _DEMO, "--prompts", texts, "--output", file]
    words += [*_LIMITS.split(), *_OPTIONS[experiment].split()]
    assert run(parser.parse_args([str(word) for word in words])) == 0
    results = json.loads(file.read_text())["results"]
    assert results
    for entry in results.values():
        assert entry["command"] == f"paceline bench papers {experiment}"
        assert entry["texts"] >= 1
        ends = [
            ends
            for kind in (entry["arms"], entry["over"])
            for measures in kind.values()
            for line in measures.values()
            for ends in line.values()
        ]
        assert ends
        assert all(low <= value <= high for low, value, high in ends)
    # The same command measures nothing again.
    monkeypatch.setattr(papers, "figures", None)
    assert run(parser.parse_args([str(word) for word in words])) == 0


def test_intervals_are_of_ratios_over_texts_and_arms_are_paired() -> None:
    short = [(2.0, 1.0), (30.0, 10.0), (12.0, 6.0)]
    low, value, high = estimate(short)
    assert value == round(44 / 17, 3)
    assert 2.0 <= low <= value <= high <= 3.0
    twice = [(2 * above, below) for above, below in short]
    assert estimate(twice, short) == [2.0, 2.0, 2.0]
    found = figures({"one": {"m": {1.0: short, 2.0: [(0, 0)]}}, "two": {"m": {1.0: twice}}})
    assert found["over"] == {"two": {"m": {"1": [2.0, 2.0, 2.0]}}}
    assert list(found["arms"]["one"]["m"]) == ["1"]
