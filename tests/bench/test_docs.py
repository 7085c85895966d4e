"""Figures in README and docs are those of the recorded results, and the report is one file."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.docs.own import unexplained
from paceline.bench.docs.pages import filled, without_parts
from paceline.bench.docs.results import FigureError, Results
from paceline.bench.docs.run import run
from paceline.bench.page.write import write

ROOT = Path(__file__).resolve().parents[2]
EVIL = "<script>alert(1)</script>"


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """A repository with one result file and one page."""
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    packages = {"torch": "2", "transformers": "5"}
    machine = {"cores": 2, "processor": EVIL, "isa": ["avx2"], "memory_gib": 8.0, "python": "3"}
    row = {"tokens_per_second": 10.0, "against_none": 1.0, "against_transformers": 2.0}
    rows = {
        "paceline none": {**row, "against_transformers_best": 1.5},
        f"paceline {EVIL}": {
            **row,
            "against_none": 1.234,
            "against_transformers_best": 1.6,
            "always": 0.9,
            "accepted_length": 2.5,
            "accepted_length_without_bonus": 1.5,
            "draft_ms": 1.0,
            "verify_ms": 2.0,
        },
    }
    cell: dict[str, Any] = {
        "group": f"demo, {EVIL}", "target": "demo", "set": EVIL, "context": 1024, "yarn": None,
        "prompts": 2, "prompt_tokens": 900, "runs": 4, "identical": True, "rows": rows,
        "prefill_seconds": {"paceline": 1.0, "transformers": 2.0},
    }  # fmt: skip
    cells = [{**cell, "temperature": heat} for heat in (0.0, 1.0)]
    table = {"tokens": 64, "complete": True, "cells": cells}
    file = folder / "cpu-2x-amd-epyc-table.json"
    file.write_text(json.dumps({"machine": {**machine, "packages": packages}, "table": table}))
    (tmp_path / "docs" / "site").mkdir(parents=True)
    (tmp_path / "docs" / "site" / "numbers.txt").write_text("# none\n5%\n")
    return Results(tmp_path)


def test_every_figure_of_the_documents_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ROOT, check=True) == 0, capsys.readouterr().err


def test_a_figure_that_differs_is_found(
    results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = "<!-- result: table table/cells/0/prompts d -->2<!-- end -->"
    page = results.root / "README.md"
    for text, expected in (
        (f"So many: {wanted}.", 0),
        (f"So many: {wanted.replace('2<', '3<')}.", 1),
        ("It is 1.7 times as fast.", 1),
        ("As in section 3.3, on Python 3.11, and `1.7` is code; 5%.", 0),
        ("Open <!-- results: table --> for ever.", 1),
        (f"\n{wanted} begins a line.", 1),
    ):
        page.write_text(text)
        assert run(results.root, check=True) == expected, text
        assert page.read_text() == text
        assert bool(capsys.readouterr().err) == bool(expected)


def test_parts_are_made_of_the_results(results: Results) -> None:
    made = filled("x <!-- result: table table/cells/1/runs .1f -->?<!-- end -->", results)
    assert without_parts(made) == "x "
    assert ">4.0<" in made
    assert filled(made, results) == made
    block = filled("<!-- results: table-summary -->\n<!-- end -->", results)
    assert "2.50 (1.50); 1.23 / 2.00 / 1.60" in block
    assert filled(block, results) == block
    with pytest.raises(FigureError, match="no block is named"):
        filled("<!-- results: nothing -->\n<!-- end -->", results)
    with pytest.raises(FigureError, match="has no table/cells/9"):
        filled("x <!-- result: table table/cells/9/runs d --><!-- end -->", results)


@pytest.mark.parametrize("measured", ["12.5 ms", "by 3%", "1,024.5", "a 12 % share", "(0.97)"])
def test_numbers_of_ones_own_are_found(measured: str) -> None:
    assert list(unexplained(f"First.\nIt takes {measured}.\n", "")) == [f"It takes {measured}."]


def test_the_report_is_one_file_that_believes_nobody(results: Results, tmp_path: Path) -> None:
    write(results, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 4
    assert "1.23" in page
    assert EVIL not in page
    assert "&lt;script&gt;" in page
    outside = [link for link in re.findall(r"(?:src|href)=\"([^\"]+)", page) if link[0] != "#"]
    assert not outside
    assert "@import" not in page
