"""A few cases of `make campaign`, and what it says of a difference."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import campaign
import engine_texts
import pytest

from paceline.decoder import Decoder, ForwardResult
from paceline.kernels import TreePlan

SEED = 7


def lines_of(captured: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in captured.splitlines() if line.startswith('{"case"')]
    return [line for line in found if len(line) > 1]


def prints(lines: Sequence[dict[str, Any]], end: str = "") -> list[str]:
    """A worker that writes these lines whatever it is asked."""
    written = "".join(f"print({json.dumps(line)!r}, flush=True)\n" for line in lines)
    return [sys.executable, "-c", f"import os\n{written}{end}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("campaign")


@pytest.fixture(autouse=True)
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_texts, "PARTS", 40)


def test_texts_have_the_same_bits(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    campaign.work(SEED, range(2), folder)
    found = lines_of(capfd.readouterr().out)
    assert [line["case"] for line in found] == [0, 1]
    assert all(line["generations"] > 40 for line in found)
    assert not any(line["differences"] for line in found)


def test_a_row_of_a_tree_with_other_bits_is_found(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Decoder.forward

    def careless(
        self: Decoder, tokens: Any, plan: TreePlan, *args: Any, **kw: Any
    ) -> ForwardResult:
        result = forward(self, tokens, plan, *args, **kw)
        if plan.blocks[0].parents is not None:
            result.logits[0] *= 1 + 2**-20
        return result

    monkeypatch.setattr(Decoder, "forward", careless)
    campaign.work(SEED, range(1), folder)
    (line,) = lines_of(capfd.readouterr().out)
    assert "log-probabilities" in line["differences"][0]


def test_a_difference_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = {"case": 5, "generations": 9, "seconds": 1.0, "axes": {}, "differences": ["tokens"]}
    arguments = ["--seed", "3", "--case", "5", "--folder", str(tmp_path)]
    assert campaign.main(arguments, prints([{"case": 5}, {**line, "differences": []}])) == 0
    assert not capfd.readouterr().out
    assert campaign.main(arguments, prints([{"case": 5}, line])) == 1
    again = "tests/campaign/campaign.py --seed 3 --case 5"
    assert capfd.readouterr().out.rstrip().endswith(again)
    assert campaign.main(arguments, prints([{"case": 5}], "os.abort()")) == 1
    reported = capfd.readouterr().out
    assert "ended with status -6" in reported
    assert reported.rstrip().endswith(again)


def test_a_run_goes_on(tmp_path: Path) -> None:
    line = {"generations": 9, "seconds": 1.0, "axes": {"threads": {"1": 9}}, "differences": []}
    output = tmp_path / "results.json"
    for generations, first, found in ((10, 0, {}), (30, 48, {"differences": ["finish"]})):
        worker = prints([{"case": first + case, **line, **found} for case in range(2)])
        arguments = ["--generations", str(generations), "--folder", str(tmp_path)]
        status = campaign.main([*arguments, "--output", str(output)], worker)
        assert status == int(bool(found))
    kept = json.loads(output.read_text())["results"]["seed 1"]
    assert (kept["next_case"], kept["generations"], kept["different_cases"]) == (50, 36, 2)
    assert kept["axes"] == {"threads": {"1": 36}}
    assert "--case 48: finish" in kept["differences"][0]
