"""Result files, options, targets and prompts of `paceline bench`."""

import argparse
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.bench.cli import _MODULES, add_arguments
from paceline.bench.record import Results, commit, digest
from paceline.convert import open_model

ROOT = Path(__file__).parents[2]


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


def test_an_entry_names_commit_model_and_drafters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = ROOT / "models" / "demo"
    file, drafter = tmp_path / "found.json", tmp_path / "drafter"
    shutil.copytree(demo / "longspec", drafter)
    results = Results("load", file, demo / "target")
    results.uses({"one": f"longspec:{drafter},target={demo / 'target'}", "two": "ngram"})
    results.add("before", {})
    (drafter / "model.safetensors").write_bytes(b"other weights")
    results.uses({"one": f"longspec:{drafter}"})
    results.add("after", {})
    written = json.loads(file.read_text())
    before, after = written["results"].values()
    assert written["target"] == open_model(demo / "target").fingerprint()
    assert before["digests"] == {"one": digest(demo / "longspec")} != after["digests"]
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False)
    assert (before["commit"] or "").removesuffix("-dirty") == found.stdout.decode().strip()
    monkeypatch.setenv("PATH", "")
    assert commit() is None


def test_a_command_has_no_folders_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--target", "/home/me/T", "--drafter", "a=m:/x/y/D,target=/x/T,rate=1/2", "--server"]
    monkeypatch.setattr(sys, "argv", ["", *words, "s=http://h/v1", "models/smollm2"])
    results = Results("load", tmp_path / "found.json")
    results.add("one", {})
    found = "--target T --drafter a=m:D,target=T,rate=1/2 --server s=http://h/v1 models/smollm2"
    assert results.entries["one"]["command"] == f"paceline {found}"


def test_every_command_has_options_and_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    required = {
        "acceptance": ["--drafter", "ngram"],
        "papers": ["table"],
    }
    for name, module in _MODULES.items():
        args = parser.parse_args([name, *required.get(name, [])])
        assert args.bench_command == name
        assert callable(importlib.import_module(module).run)
    drills = parser.parse_args(["drills", "no such drill"])
    assert importlib.import_module(_MODULES["drills"]).run(drills) == 2
    assert "expected some of: swap" in capsys.readouterr().err
