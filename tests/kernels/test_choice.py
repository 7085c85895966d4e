"""Which attention backend a GPU uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.kernels.attention import cuda_backend, preferred_backend, remember_backend


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PACELINE_ATTENTION", raising=False)
    return tmp_path


def test_the_measured_one_is_used_unless_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert preferred_backend("A") == "triton"
    remember_backend("A", "flash_attn")
    remember_backend("B", "dense")
    assert [preferred_backend(name) for name in "ABC"] == ["flash_attn", "dense", "triton"]
    monkeypatch.setenv("PACELINE_ATTENTION", "dense")
    assert preferred_backend("A") == "dense"
    monkeypatch.setenv("PACELINE_ATTENTION", "fastest")
    with pytest.raises(RuntimeError, match="expected one of triton, flash_attn, dense"):
        preferred_backend("A")


@pytest.mark.parametrize("text", ["", "[]", '{"A": "fastest"}'])
def test_an_invalid_file_is_ignored(cache: Path, text: str) -> None:
    remember_backend("A", "dense").write_text(text)
    assert preferred_backend("A") == "triton"


def test_a_missing_package_gives_way() -> None:
    pytest.importorskip("triton")
    assert cuda_backend("flash_attn").name in ("flash_attn", "triton")
    assert cuda_backend("dense").name == "dense"
