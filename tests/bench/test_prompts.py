"""The benchmark's prompts, made from the repository's demo prompts."""

from pathlib import Path

import pytest

from paceline.bench.models import Models
from paceline.bench.prompts import Prompt, demo_prompts, long_prompts

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


def test_long_prompts_are_pieces_of_held_out_files() -> None:
    first, second = long_prompts(DEMO.prompts, DEMO.target, 960, 2)
    assert len(first) == len(second) == 960
    assert first != second
    with pytest.raises(ValueError, match="expected at least 1000000"):
        long_prompts(DEMO.prompts, DEMO.target, 1_000_000, 1)
