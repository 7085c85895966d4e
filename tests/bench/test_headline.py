"""Lines to quote from a table, and the pictures of README."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.headline import chart, headline
from paceline.bench.recording import Recording

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
MACHINE = "cpu-2x-amd-epyc-26-2"


def contestant(rate: float, over: float | None = None, same: int = 2) -> dict[str, Any]:
    figures: dict[str, Any] = {"tokens_per_second": [rate, rate, rate]}
    if over is not None:
        figures |= {"over_none": [over, over, over], "compared": 2, "same_output": same}
    return {"figures": figures}


def test_five_lines() -> None:
    chat = {
        "paceline int8 none": contestant(100),
        "paceline int4 none": contestant(200),
        "paceline int4 ngram": contestant(180, 0.9),
        "paceline int4 dspark": contestant(220, 1.1),
        "llama.cpp Q4_1 none": contestant(80),
    }
    assert headline("m", {"chat, T = 0, 1 user": chat}) == [
        "Machine: m",
        "Format: 4 bits",
        "Plain decoding: 200 tokens/s in chats of one user, 2.5 times the fastest other engine "
        "here (llama.cpp Q4_1)",
        "With drafts, times as fast as plain decoding: chat 1.10 (dspark)",
        "Identical to plain decoding: yes (4 of 4 texts)",
    ]


def test_a_text_that_differs_is_no_small_print() -> None:
    chat = {"paceline int4 none": contestant(9), "paceline int4 x": contestant(9, 1.0, same=1)}
    assert headline("m", {"chat, T = 0, 1 user": chat})[-1].endswith("NO (1 of 2 texts)")


def test_the_chart_of_readme_is_that_of_its_results() -> None:
    step, table = (
        json.loads((RESULTS / f"{MACHINE}-{name}.json").read_text()) for name in ("step", "table")
    )
    drawn = chart(step, table, "smollm2 beside rivals", "int4")
    assert (ROOT / "docs" / "images" / "speed.svg").read_text() == drawn
    table["machine"]["kind"] = "another"
    with pytest.raises(ValueError, match="expected one machine"):
        chart(step, table, "smollm2 beside rivals", "int4")


def test_a_recording_is_a_picture_whose_lines_appear_at_their_times() -> None:
    shown = Recording()
    shown.add("command", "$ one")
    shown.add("", "a < b " * 40)
    picture = shown.svg()
    assert "a &lt; b" in picture
    assert picture.count("animation-delay") == len(shown.lines) > 2
    ElementTree.fromstring(picture)


@pytest.mark.parametrize(
    ("where", "engine", "shown"),
    [
        ("step", "vllm bfloat16", "vLLM bfloat16"),
        ("table", "vllm bfloat16", "vLLM bfloat16, chats"),
        ("table", "vllm-0.32.0 bfloat16", "vLLM 0.32.0 bfloat16, chats"),
    ],
)
def test_vllm_is_drawn_from_either_file(where: str, engine: str, shown: str) -> None:
    step, table = (
        json.loads((RESULTS / f"{MACHINE}-{name}.json").read_text()) for name in ("step", "table")
    )
    for engines in step["results"]["smollm2 beside rivals"]["quartiles"].values():
        del engines["vllm bfloat16"]
    before = chart(step, table, "smollm2 beside rivals", "int4")
    assert "vLLM" not in before
    if where == "step":
        context = next(iter(step["results"]["smollm2 beside rivals"]["quartiles"].values()))
        context[engine] = {"tokens_per_s": [6.0, 7.0, 8.0]}
    else:
        cell = table["results"]["chat, T = 0, 1 user"]["contestants"]
        cell[f"{engine} none"] = contestant(7)
        cell[f"{engine} n-gram"] = contestant(9, 1.3)
    drawn = chart(step, table, "smollm2 beside rivals", "int4")
    assert f">{shown}</text>" in drawn
    assert drawn.count('class="other"') == before.count('class="other"') + 1
