"""Accepted lengths under KV budgets: longer contexts, policies, tables and the plot."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from paceline.bench import budgets, longer
from paceline.bench.budget_report import remote_table, table
from paceline.bench.page import pictures
from paceline.bench.selected import POLICIES, SelectedKv, selected
from paceline.bench.texts import joined
from paceline.decoder import Decoder, load_config
from paceline.drafter import Resources
from paceline.drafter.acceptance import accepted_lengths, record
from paceline.drafter.methods.longspec import LongSpecDrafter
from paceline.longspec import LongSpecConfig, LongSpecModel, TargetRef, read_longspec, save_longspec

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random layer for the demo target."""
    folder = tmp_path_factory.mktemp("layer") / "layer"
    torch.manual_seed(0)
    config = LongSpecConfig.for_target(DEMO / "target", window=64)
    weights = LongSpecModel(config).state_dict()
    save_longspec(folder, config, weights, TargetRef.of(DEMO / "target"))
    return folder


def load(layer: Path, budget: int, target: Path = DEMO / "target") -> LongSpecDrafter:
    options = {"target": str(target), "context": str(budget), "widths": "2,2,2"}
    return LongSpecDrafter.load(layer, options, Resources())


def test_longer_copies_fit_each_other(layer: Path, tmp_path: Path) -> None:
    target = longer.lengthen(DEMO / "target", tmp_path / "target", 4)
    assert load_config(target).max_position == 16_384
    assert load_config(target).rope_scaling > 1
    fitted = longer.lengthen(layer, tmp_path / "layer", 4, target)
    assert read_longspec(fitted)[0].rope_inv_freq == load_config(target).rope_inv_freq
    assert load(fitted, 64, target).max_depth == 3
    same = longer.lengthen(DEMO / "target", tmp_path / "same", 1)
    assert load_config(same) == load_config(DEMO / "target")
    with pytest.raises(ValueError, match="scales its RoPE already"):
        longer.lengthen(target, tmp_path / "again", 2)


def test_texts_are_pieces_of_files_put_together() -> None:
    pieces = joined(DEMO, 9000, 3)
    assert [len(piece) for piece in pieces] == [9000] * 3
    assert len({tuple(piece[:50]) for piece in pieces}) == 3
    assert pieces[0][0] == 0
    assert pieces[0].count(0) >= 2
    with pytest.raises(ValueError, match="expected at least"):
        joined(DEMO, 10_000_000, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_chooses_as_a_verifier_would(layer: Path, policy: str) -> None:
    """By what the real target looks at; and leaves the recording as it was."""
    decoder = Decoder.load(DEMO / "target", "bfloat16")
    recording = record(decoder, list(range(5, 245)), 20)
    before = [plane.clone() for plane in recording.cache.layer(7)]
    seen: list[set[int]] = []
    with selected(decoder, recording) as segment:
        kv = SelectedKv(decoder, recording, segment, 7, policy)
        everything = SelectedKv(decoder, recording, segment, 7, policy)
        plain = accepted_lengths(load(layer, 0), recording)
        assert everything.accepted_lengths(load(layer, 0)) == plain
        kv.accepted_lengths(load(layer, 64))
        kv.refresh(kv.committed, 64)
        [(keys, values)] = kv.parts(7)
        for plane, whole in zip((keys, values), before, strict=True):
            assert 48 < plane.shape[1] <= 64
            places = (plane[0, :, None] == whole[0, None]).all(-1)
            assert places.any(1).all()
            seen.append(set(places.int().argmax(1).tolist()))
    assert max(seen[0]) == kv.committed - 1
    assert len({place for place in seen[0] if place < 200}) > 4  # not just the newest
    for plane, whole in zip(recording.cache.layer(7), before, strict=True):
        assert torch.equal(plane[:, : len(recording.cache)], whole[:, : len(recording.cache)])


def test_drafters_are_measured_as_what_they_are(layer: Path, tmp_path: Path) -> None:
    extra = {"another layer": layer, "another lm": DEMO / "target", "missing": tmp_path}
    found = {each.name: each for each in budgets.subjects(DEMO, extra)}
    assert found["plain"].policies == ("streaming", *POLICIES)
    assert (found["another layer"].method, found["another layer"].policies) == (
        "longspec", ("streaming",),
    )  # fmt: skip
    assert (found["another lm"].method, found["lm, plain"].method) == ("lm", "lm")
    assert "missing" not in found


def test_rows_tell_each_drafter_policy_and_budget(layer: Path, tmp_path: Path) -> None:
    subject = budgets.Subject("random", "longspec", layer, ("streaming", "quest"))
    rows = budgets.measure(
        DEMO, [subject], tmp_path, dtype="bfloat16", count=1, progress=str,
        contexts=(300,), budgets=(64, 512, 0),
    )  # fmt: skip
    assert [(row["policy"], row["budget"]) for row in rows] == [
        ("streaming", 64), ("all", 0), ("quest", 64),
    ]  # fmt: skip
    assert {row["rope"] for row in rows} == {"as trained"}
    assert all(row["accepted_length"] >= 1 for row in rows)


def _rows() -> list[dict[str, Any]]:
    lengths = {64: 2.0, 256: 2.5, 0: 2.2}
    return [
        {
            "context": 1024, "rope": "as trained", "drafter": "plain", "budget": budget,
            "policy": "streaming" if budget else "all", "accepted_length": length,
        }
        for budget, length in lengths.items()
    ]  # fmt: skip


def test_the_spread_tells_how_flat_a_drafter_is(tmp_path: Path) -> None:
    [entry] = budgets.spreads(_rows())
    assert (entry["least"], entry["most"]) == (2.0, 2.5)
    assert entry["spread"] == pytest.approx(0.2)
    screen = io.StringIO()
    Console(file=screen, width=200).print(table(_rows()))
    assert "20%" in screen.getvalue()
    ways = {
        "map, all": {
            "accepted_length": 3.0, "share_of_map_all": 1.0, "first_kv_bytes": 0.0,
            "kv_bytes_a_round": 2048.0, "kv_share": 0.001,
        }
    }  # fmt: skip
    Console(file=screen, width=200).print(remote_table(ways))
    assert "0.10%" in screen.getvalue()


def test_the_plot_is_the_same_for_the_same_figures() -> None:
    [first], [second] = pictures.budgets(_rows()), pictures.budgets(_rows())
    assert first == second
    assert "1,024 tokens" in first
    assert "plain, streaming" in first
