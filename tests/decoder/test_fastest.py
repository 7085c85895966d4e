"""The format of a GGUF file's matrices that `auto` takes: what a request takes less time in."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoder_cases import save_model
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf

from paceline.convert import fastest, store
from paceline.convert.store import prepare


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", save_model(tmp_path / "model", "llama"), Kind.Q4_1)


def measured(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
    """Passes take so long, by the format of the first matrix, here and not in a child."""
    monkeypatch.setattr(store, "run_in_child", lambda work, *_, progress, **__: work(progress))
    monkeypatch.setattr(fastest, "_SMALL", 0)
    monkeypatch.setattr(fastest, "_pass", lambda matrices, *_: seconds[matrices[0].format])


@pytest.mark.parametrize(("rotated", "expected"), [(0.9, "int8"), (0.97, "gguf"), (1.1, "gguf")])
def test_auto_takes_int8_where_it_is_faster_and_keeps_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, rotated: float, expected: str
) -> None:
    measured(monkeypatch, {"int4": 1.0, "rotated": rotated})
    assert prepare(file).description.config.weights == expected
    assert prepare(file, "stored").description.config.weights == "gguf"
    measured(monkeypatch, {})  # to measure again would fail
    assert prepare(file).description.config.weights == expected


def test_nothing_is_measured_for_a_small_file_or_without_memory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prepare(file).description.config.weights == "gguf"
    file.touch()  # another entry
    measured(monkeypatch, {})
    monkeypatch.setattr(fastest, "_free_bytes", lambda: 0)
    assert prepare(file).description.config.weights == "gguf"


def test_a_model_without_a_form_in_8_bits_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """84 inputs are no multiple of 8, and of no block either: that matrix is stored in floats."""
    folder = save_model(tmp_path / "model", "llama", intermediate_size=84)
    kinds = {f"blk.{layer}.ffn_down.weight": Kind.F32 for layer in range(4)}
    file = write_gguf(tmp_path / "model.gguf", folder, Kind.Q4_1, kinds)
    monkeypatch.setattr(fastest, "_SMALL", 0)
    assert prepare(file).description.config.weights == "gguf"


def test_real_products_are_timed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest, "_SMALL", 0)
    assert prepare(file).description.config.weights in ("gguf", "int8")
