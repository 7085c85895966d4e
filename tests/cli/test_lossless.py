"""`paceline verify-lossless` with real services, and its report of differences."""

import json
from pathlib import Path

import pytest

from paceline.cli import lossless
from paceline.cli.main import main
from paceline.client import GenerationResult, Stats, TokenLogprob, Usage


def result(tokens: list[int], gaps: list[float]) -> GenerationResult:
    noted = [
        TokenLogprob(token, -1.0, ((token, -1.0), (0, -1.0 - gap)))
        for token, gap in zip(tokens, gaps, strict=True)
    ]
    return GenerationResult(
        "", tokens, noted, None, "length", None, Usage(1, len(tokens)), Stats(), 1
    )


def test_real_services_are_compared(
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    prompts = tmp_path / "prompts.jsonl"
    texts = ["one and one and one and", "two, two, two, two"]
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    arguments = ["--target", str(target), "--prompts", str(prompts)]
    arguments += ["--max-new-tokens", "24", "--json", str(tmp_path / "report.json")]
    assert main(["verify-lossless", *arguments]) == 0
    assert "identical tokens: yes" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["positions"] == 2 * 2 * 24
    assert [(each["drafter"], each["temperature"]) for each in report["comparisons"]] == [
        ("ngram", 0.0),
        ("ngram", 1.0),
    ]
    assert all(each["tokens"] == 48 for each in report["comparisons"])


def test_the_first_difference_and_its_gap() -> None:
    plain = result([1, 2, 3], [1.0, 1e-5, 1.0])
    found = lossless._difference(7, plain, result([1, 9, 3], [1.0, 1.0, 1.0]))
    assert found == lossless.Difference(7, 1, 2, 9, pytest.approx(1e-5))
    shorter = lossless._difference(0, plain, result([1, 2], [1.0, 1.0]))
    assert shorter == lossless.Difference(0, 2, 3, None, pytest.approx(1.0))
    assert lossless._difference(0, plain, plain) is None


def test_files_without_prompts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("")
    assert main(["verify-lossless", "--target", "x", "--prompts", str(file)]) == 2
    assert "paceline verify-lossless: " in capsys.readouterr().err
