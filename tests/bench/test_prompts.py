"""The benchmark's prompt sets, as the repository's own models give them."""

from pathlib import Path

from paceline.bench.prompts import Prompt, load

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def of(name: str, prompts: list[Prompt]) -> list[Prompt]:
    return [prompt for prompt in prompts if prompt.set == name]


def test_two_sets_are_heldout_prompts_sampled() -> None:
    prompts = load(DEMO / "prompts", DEMO / "target")
    sets = {"heldout", "sampled", "trained", "copying", "no match"}
    assert {prompt.set for prompt in prompts} == sets
    heldout = [prompt.tokens for prompt in of("heldout", prompts)]
    for name, temperature in (("sampled", 1.0), ("no match", 2.0)):
        sampled = of(name, prompts)
        assert {prompt.temperature for prompt in sampled} == {temperature}
        assert len({prompt.seed for prompt in sampled}) == len(sampled) == 4
        assert [prompt.tokens for prompt in sampled] == heldout[:4]
    greedy = [prompt for prompt in prompts if prompt.set not in ("sampled", "no match")]
    assert {prompt.temperature for prompt in greedy} == {0.0}


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
