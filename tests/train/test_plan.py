"""What a run says of its rest, and arms of the papers."""

import argparse
from pathlib import Path

import pytest

from paceline.train import cli
from paceline.train.loop import _report
from paceline.train.presets import Plan, Stage
from paceline.train.run import Progress


@pytest.mark.parametrize(("minutes", "left"), [(1000, 30.0), (20, 10.0)])
def test_a_report_says_how_long_the_rest_takes(
    minutes: float, left: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """By steps or by minutes, whichever ends the run."""
    plan = Plan((Stage("all", 1.0, 1, 1),), minutes=minutes, steps=40)
    _report(Progress(step=10, tokens=600, elapsed=600.0), plan)
    assert f"1 tokens/s, 10.0 min, {left:.1f} left" in capsys.readouterr().out


def test_the_paper_s_arm_of_dspark_differs_in_what_the_paper_says(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    presets = []
    for words in ([], ["--as-paper"]):
        args = parser.parse_args(["dspark", "--preset", "smollm2", *words])
        presets.append(vars(args.recipe.vary(args.recipe.presets[args.preset], args)))
    ours, paper = presets
    differing = {name: paper[name] for name in paper if paper[name] != ours[name]}
    assert differing == {"state_input": False, "ce": 0.1, "tv": 0.9, "certainty": 1.0}
