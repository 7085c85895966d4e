"""The benchmark's prompts, made from the repository's demo prompts."""

import argparse
import json
from pathlib import Path

import pytest

from paceline.bench.cli import add_arguments
from paceline.bench.models import Models
from paceline.bench.prompts import Prompt, demo_prompts, long_prompts
from paceline.bench.table.run import groups

FOLDER = Path(__file__).parents[2] / "models" / "demo"
DEMO = Models(FOLDER, FOLDER / "target")


def of(name: str, prompts: list[Prompt]) -> list[Prompt]:
    return [prompt for prompt in prompts if prompt.set == name]


def test_demo_sets() -> None:
    prompts = demo_prompts(DEMO.prompts, DEMO.target)
    heldout = [prompt.tokens for prompt in of("heldout", prompts)]
    for name, temperature in (("heldout", 0.0), ("sampled", 1.0)):
        found = of(name, prompts)
        assert {prompt.temperature for prompt in found} == {temperature}
        assert [prompt.tokens for prompt in found] == heldout[: len(found)]
    for whole, copying in zip(of("trained", prompts), of("copying", prompts), strict=True):
        text, again = whole.tokens, copying.tokens[len(whole.tokens) + 1 :]
        assert copying.tokens[: len(text)] == text
        assert 0 < len(again) < len(text)
        assert again == text[: len(again)]


def test_prompts_of_the_table_leave_room_for_the_text(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["table", "--context", "1024", "--texts", "2"])
    [(name, length, long)] = groups(args, DEMO)
    assert (name, length) == ("1024 tokens", 1024)
    assert [len(ids) for ids in long] == [960, 960]
    assert long[0] != long[1]
    file = tmp_path / "talk.jsonl"
    lines = [{"turns": ["def first():", "no"]}, {"question": "a second one"}, [1] * 5000]
    file.write_text("\n".join(map(json.dumps, lines)))
    args = parser.parse_args(["table", "--prompts", str(file)])
    [(name, _, own)] = groups(args, DEMO)
    assert (name, len(own)) == ("talk", 2), "the third is too long for the target"
    file.write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="expected prompts of 2 to 4032 tokens"):
        list(groups(args, DEMO))
    with pytest.raises(ValueError, match="expected at least 1000000"):
        long_prompts(DEMO.prompts, DEMO.target, 1_000_000, 1)


def test_copies_for_a_longer_context(tmp_path: Path) -> None:
    assert DEMO.for_context(DEMO.max_position, tmp_path) is DEMO
    longer = DEMO.for_context(3 * DEMO.max_position, tmp_path)
    assert longer.max_position == 3 * DEMO.max_position
    assert set(longer.trained) == set(DEMO.trained)
    config = json.loads((longer.target / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "yarn"
    with pytest.raises(ValueError, match="scales its RoPE already"):
        longer.for_context(6 * DEMO.max_position, tmp_path / "again")
