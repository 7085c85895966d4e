"""Accepted lengths: texts, figures, tables, and rejection sampling."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from paceline.bench import acceptance, accepted, coupling, texts
from paceline.bench.acceptance import Cell
from paceline.bench.figures import accepted_length
from paceline.bench.rejection import settle
from paceline.drafter.methods.longspec import (
    LongSpecConfig,
    LongSpecModel,
    TargetRef,
    save_longspec,
)

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def shown(table: Any) -> str:
    screen = io.StringIO()
    Console(file=screen, width=200).print(table)
    return screen.getvalue()


def test_heldout_texts_have_their_lengths_and_places() -> None:
    found = texts.load(DEMO, 4, (300, 1000), ["heldout"])
    assert [len(text.tokens) for text in found] == [300] * 4 + [1000] * 4
    assert {text.set for text in found} == {"heldout"}
    assert len({text.file for text in found[:4]}) == 4
    assert len({tuple(text.tokens[:50]) for text in found}) >= 7


@given(st.lists(st.lists(st.integers(0, 4), max_size=20), min_size=1, max_size=6))
def test_figures_are_means_over_rounds(rounds: list[list[int]]) -> None:
    every = [count for text in rounds for count in text]
    found = accepted_length(rounds)
    if not every:
        assert found == {}
        return
    assert found["rounds"] == len(every)
    assert found["accepted_length"] == pytest.approx(1 + sum(every) / len(every))
    assert sum(found["by_position"]) == pytest.approx(found["accepted_length_without_bonus"])
    low, high = found["interval_95"]
    each = [1 + sum(text) / len(text) for text in rounds if text]
    assert min(each) - 1e-9 <= low <= high <= max(each) + 1e-9


def test_texts_that_loop_are_told_apart() -> None:
    rounds = {"ngram": [[4, 4], [1, 2], [0, 0]]}
    cell = Cell(contexts=[300, 300, 1000], distinct=[0.1, 0.9, 0.7], rounds=rounds)
    summary = cell.summary()
    assert (summary["looping_texts"], summary["texts"]) == (1, 3)
    parts = summary["drafters"]["ngram"]
    assert parts["all"]["accepted_length"] == pytest.approx(1 + 11 / 6)
    assert parts["300"]["accepted_length"] == pytest.approx(1 + 11 / 4)
    assert parts["not looping"]["accepted_length"] == pytest.approx(1 + 3 / 4)
    sets = {"heldout": {"T=0": summary}}
    text = shown(accepted.lengths(sets))
    assert "1 of 3" in text
    assert "2.83 (" in text
    assert "0.67" in shown(accepted.positions(sets))


def test_both_temperatures_are_measured_on_the_demo_target() -> None:
    short = texts.load(DEMO, 1, (300,), ["heldout"])
    found = acceptance.measure(
        DEMO / "target", short, {"copy": "ngram"}, dtype="bfloat16", tokens=40, progress=str
    )
    assert set(found["heldout"]) == {"T=0", "T=1"}
    for cell in found["heldout"].values():
        assert cell["drafters"]["copy"]["all"]["rounds"] > 0
        assert cell["drafters"]["copy"]["300"] == cell["drafters"]["copy"]["all"]


def test_rejection_sampling_keeps_the_targets_distribution() -> None:
    """Of two tokens in a row, the second given the first."""
    draws = torch.Generator().manual_seed(0)
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
    q = torch.tensor([[0.2, 0.2, 0.2, 0.4], [0.4, 0.4, 0.1, 0.1]])
    count, first, second, accepted_first = 6000, torch.zeros(4), torch.zeros(4), 0
    for _ in range(count):
        drafted = [int(torch.multinomial(row, 1, generator=draws)) for row in q]
        emitted = settle(p, q, drafted, draws)
        first[emitted[0]] += 1
        if len(emitted) > 1:
            accepted_first += 1
            second[emitted[1]] += 1
    assert (first / count - p[0]).abs().max() < 0.03
    assert (second / accepted_first - p[1]).abs().max() < 0.03
    overlap = float(torch.minimum(p[0], q[0]).sum())
    assert accepted_first / count == pytest.approx(overlap, abs=0.03)


def test_drafts_like_the_target_are_all_accepted_by_rejection_sampling() -> None:
    draws = torch.Generator().manual_seed(0)
    p = torch.full((4, 8), 1 / 8)
    assert settle(p, p[:3], [1, 2, 3], draws)[:3] == [1, 2, 3]


def test_five_ways_are_compared_on_one_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LongSpecConfig.for_target(DEMO / "target")
    weights = LongSpecModel(config).state_dict()
    save_longspec(tmp_path / "layer", config, weights, TargetRef.of(DEMO / "target"))
    short = texts.load(DEMO, 1, (300,), ["heldout"])
    found = coupling.measure(
        DEMO / "target", tmp_path / "layer", short, dtype="bfloat16", tokens=32, progress=str
    )
    ways = found["heldout"]
    assert len(ways) == 5
    assert all(figures["rounds"] > 0 for figures in ways.values())
    assert "chain, rejection sampling" in shown(accepted.coupling(found))
