"""Result files, and the options of `paceline bench`."""

import argparse
import importlib
import json
import re
from pathlib import Path

import pytest

from paceline.bench.cli import _MODULES, add_arguments
from paceline.bench.record import Results


def test_a_run_keeps_other_entries_of_the_same_machine_and_models(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    first = Results("load", file, dtype="float32", sizes=(1, 2))
    first.add("one", {"rate": 1})
    first.add("two", {"rate": 1})
    again = Results("load", file, dtype="float32", sizes=(1, 2))
    again.add("two", {"rate": 2})
    written = json.loads(file.read_text())
    assert written["machine"]["kind"]
    assert {name: entry["rate"] for name, entry in written["results"].items()} == {
        "one": 1,
        "two": 2,
    }
    assert "command" in written["results"]["one"]
    assert Results("load", file, dtype="bfloat16", sizes=(1, 2)).entries == {}
    assert json.loads(file.read_text().replace("\n", "")) == written
    assert '"one": {"command": ' in file.read_text(), "an entry without lists is on one line"
    assert Results("load").file.name.endswith("-load.json")


def test_every_command_has_options_and_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, module in _MODULES.items():
        required = ["--target", "models/demo", "--output", "out"] if name == "widen" else []
        args = parser.parse_args([name, *required])
        assert args.bench_command == name
        assert callable(importlib.import_module(module).run)
    drills = parser.parse_args(["drills", "no such drill"])
    assert importlib.import_module(_MODULES["drills"]).run(drills) == 2
    assert "expected some of: swap" in capsys.readouterr().err


def test_results_that_documents_cite_exist() -> None:
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    cited = {
        name
        for page in pages
        for name in re.findall(r"bench/results/([\w-]+\.json)", page.read_text(encoding="utf-8"))
        if name.islower()  # not bench/results/MACHINE-table.json
    }
    assert cited
    assert cited <= {file.name for file in (root / "bench" / "results").iterdir()}
