"""The examples of docs/examples: each call, on real services, and one round in one screen."""

import random
import re
import runpy
from pathlib import Path

import pytest
from programs import run_python

from paceline.convert import load_decoder
from paceline.drafter import Budget, Update
from paceline.harness import ServiceProcess
from paceline.kernels import SamplingRules
from paceline.tree import TokenTree

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
TARGET = ROOT / "models" / "demo" / "target"


def test_the_example_of_each_call_runs(demo: tuple[ServiceProcess, Path]) -> None:
    done = run_python(EXAMPLES / "calls.py", demo[0].address)
    assert done.returncode == 0, done.stderr
    assert "top_k must be an integer >= 0 (0 keeps all tokens), not -1" in done.stdout
    assert "('local', 'ngram')" in done.stdout
    assert "equal: 32 tokens\n" in done.stdout


def test_one_round_in_one_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It compares its texts with plain decoding itself."""
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(EXAMPLES / "one_round.py"), run_name="__main__")
    counts = re.findall(r"(\d+) tokens in (\d+) passes", capsys.readouterr().out)
    assert len(counts) == 2
    assert all(int(passes) < 0.7 * int(tokens) for tokens, passes in counts)


class Hostile:
    """Drafts random trees, most of which are wrong, some of which have the right token late."""

    def __init__(self, right: list[int]) -> None:
        self.right, self.random = right, random.Random(1)

    def draft(self, budget: Budget) -> TokenTree:
        parents = tuple(self.random.randrange(-1, node) for node in range(budget.nodes))
        tokens: list[int] = []
        for node, parent in enumerate(parents):
            before = {tokens[other] for other in range(node) if parents[other] == parent}
            token = self.random.choice([*self.right[:4], 7, 8, 9])
            tokens.append(next(each for each in (token, *range(10, 99)) if each not in before))
        return TokenTree(tuple(tokens), parents)

    def extend(self, update: Update) -> None:
        self.right = self.right[len(update.tokens) :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_round_is_exact_whatever_is_drafted(temperature: float) -> None:
    example, target = runpy.run_path(str(EXAMPLES / "one_round.py")), load_decoder(TARGET)
    params, prompt = SamplingRules(temperature=temperature, seed=3), [5, 6, 7, 8, 9]
    plain, passes = example["generate"](target, prompt, 40, params, None)
    assert passes == len(plain) == 40
    drafted, passes = example["generate"](target, prompt, 40, params, Hostile(plain))
    assert drafted[:40] == plain
    assert passes < 40
