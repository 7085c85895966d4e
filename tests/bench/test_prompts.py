"""The benchmark's prompt sets, as the repository's own models give them."""

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


def test_copying_prompts_end_with_the_beginning_of_what_they_hold() -> None:
    prompts = load(DEMO / "prompts", DEMO / "target")
    whole = {prompt.name: prompt.tokens for prompt in of("trained", prompts)}
    copying = of("copying", prompts)
    assert {prompt.name for prompt in copying} == set(whole)
    for prompt in copying:
        text = whole[prompt.name]
        again = prompt.tokens[len(text) + 1 :]
        assert prompt.tokens[: len(text)] == text
        assert 0 < len(again) < len(text)
        assert again == text[: len(again)]
