"""The benchmark's prompt sets, as the repository's own models give them."""

from itertools import pairwise
from pathlib import Path

from paceline.bench.prompts import Prompt, load

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def of(name: str, prompts: list[Prompt]) -> list[Prompt]:
    return [prompt for prompt in prompts if prompt.set == name]


def test_only_the_set_without_matches_is_sampled() -> None:
    prompts = load(DEMO / "prompts", DEMO / "target")
    assert {prompt.set for prompt in prompts} == {"heldout", "trained", "copying", "no match"}
    sampled = [prompt for prompt in prompts if prompt.temperature > 0]
    assert sampled == of("no match", prompts)
    assert len({prompt.seed for prompt in sampled}) == len(sampled) > 0
    heldout = [prompt.tokens for prompt in of("heldout", prompts)]
    assert [prompt.tokens for prompt in sampled] == heldout[:4]


def test_copying_prompts_end_in_the_middle_of_what_they_copy() -> None:
    for prompt in of("copying", load(DEMO / "prompts", DEMO / "target", length=200, copies=2)):
        assert len(prompt.tokens) == 200
        last = (prompt.tokens[-2], prompt.tokens[-1])
        assert list(pairwise(prompt.tokens)).count(last) >= 2
