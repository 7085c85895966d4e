"""Compiling the CPU kernels, and what happens where that cannot be done."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_cases import make_case

from paceline.kernels import _native, attention, backend_for, row_kernels
from paceline.kernels.rows import TorchRows


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(attention, "_LOADED", {})
    _native.library.cache_clear()
    yield tmp_path
    _native.library.cache_clear()


def test_it_is_compiled_once(fresh: Path) -> None:
    if _native.library() is None:
        pytest.skip("no gcc")
    made = list(fresh.rglob("*"))
    before = {path: path.stat().st_mtime_ns for path in made}
    assert [path.suffix for path in made if path.is_file()] == [".so"]
    _native.library.cache_clear()
    assert _native.library() is not None
    assert {path: path.stat().st_mtime_ns for path in fresh.rglob("*")} == before


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert _native.library() is None
    assert backend_for("cpu").name == "cpu"
    assert isinstance(row_kernels("cpu"), TorchRows)


@pytest.mark.usefixtures("fresh")
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    assert _native.library() is None


def test_a_compiler_that_fails_is_told_and_survived(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = fresh / "cc"
    broken.write_text("#!/bin/sh\necho this compiler is broken >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CC", str(broken))
    with caplog.at_level(logging.WARNING):
        assert _native.library() is None
    assert "this compiler is broken" in caplog.text


def test_a_home_that_cannot_be_written_is_survived(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = fresh / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    folder = _native._folder()
    assert folder.is_dir()
    assert os.access(folder, os.W_OK)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiled ahead for x86-64 only")
def test_one_compiled_ahead_needs_no_compiler(fresh: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    ahead = fresh / "ahead"
    built = _native.build_ahead(ahead)
    # The loader reads LD_LIBRARY_PATH when a process starts.
    probe = "from paceline.kernels import _native; print(_native.library()._name)"
    found = subprocess.run(
        [sys.executable, "-c", probe],
        env={**os.environ, "LD_LIBRARY_PATH": str(ahead), "CC": "no-such-compiler"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == built[0].name


@pytest.mark.parametrize("heads", [(6, 2, 24), (4, 1, 8)])
def test_odd_head_sizes_fall_back(heads: tuple[int, int, int]) -> None:
    case = make_case(0, 300, (-1, 0, 0, 1), heads)
    alone, _ = case.run_alone(3)
    assert torch.equal(case.run()[0][3], alone[0])
