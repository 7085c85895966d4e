"""Drafters that are loaded for a target where none is named."""

import shutil
from pathlib import Path

import pytest

from paceline.cli import shipped

DEMO = Path(__file__).parents[2] / "models" / "demo"


def test_drafters_are_found_by_the_weights_of_their_target(target: Path, tmp_path: Path) -> None:
    ours = DEMO / "target"
    assert shipped.drafters_for(ours) == [
        f"longspec=longspec:{DEMO / 'longspec'},target={ours}",
        f"dspark=dspark:{DEMO / 'dspark'},target={ours}",
        f"lm=lm:{DEMO / 'lm'}",
        "ngram=ngram",
    ]
    moved = tmp_path / "elsewhere"
    shutil.copytree(ours, moved)
    assert len(shipped.drafters_for(moved)) == 4
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    assert shipped.drafters_for(moved) == [f"lm=lm:{DEMO / 'lm'}", "ngram=ngram"]
    untrained = ["ngram=ngram", f"selfspec=selfspec:{target},weights=int4"]
    assert shipped.drafters_for(target) == untrained


def test_without_a_checkout_nothing_ships(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "models_folder", lambda: None)
    assert [spec.partition("=")[0] for spec in shipped.drafters_for(target)] == [
        *("ngram", "selfspec")
    ]
