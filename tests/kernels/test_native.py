"""Compiling and finding the CPU kernels, and what happens where that cannot be done."""

from __future__ import annotations

import itertools
import logging
import os
import platform
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from imports import packages_after
from kernel_cases import make_case

from paceline.kernels import (
    LayerTable,
    _compile,
    _native,
    attention,
    backend_for,
    raw_logprobs,
)
from paceline.kernels.linear import multiply, pack
from paceline.kernels.rows import TorchRows, row_kernels

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
x86_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="compiled ahead for x86-64")


@needs_compiler
def test_with_a_compiler_there_are_kernels() -> None:
    """Other tests skip without them, so a source that does not compile would go unnoticed."""
    kernels = _native.cpu_kernels()
    assert os.environ.get(_native.VARIABLE) == "none" or kernels.library is not None, kernels.origin


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, no libraries of a wheel, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(_native.VARIABLE, raising=False)
    monkeypatch.setattr(_compile, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(attention, "LOADED", {})
    _native.cpu_kernels.cache_clear()
    yield tmp_path
    _native.cpu_kernels.cache_clear()


@needs_compiler
def test_it_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = fresh.with_name("quick-cc")
    quick.write_text('#!/bin/sh\nexec gcc "$@" -O0\n')
    quick.chmod(0o700)
    monkeypatch.setenv("CC", str(quick))
    assert _native.cpu_kernels().origin == "compiled on this machine"
    made = list(fresh.rglob("*"))
    before = {path: path.stat().st_mtime_ns for path in made}
    assert [path.suffix for path in made if path.is_file()] == [".so"]
    _native.cpu_kernels.cache_clear()
    assert _native.library() is not None
    assert {path: path.stat().st_mtime_ns for path in fresh.rglob("*")} == before


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_torch_does_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert _native.cpu_kernels().level == "none"
    assert "install gcc" in caplog.text
    assert backend_for("cpu").name == "dense"
    assert isinstance(row_kernels("cpu"), TorchRows)


def test_sources_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The compilers of the first two sources wait for each other."""
    together, numbers = threading.Barrier(2, timeout=60), itertools.count()
    linked: list[str] = []

    def run(command: list[str]) -> None:
        if "-c" in command and next(numbers) < 2:
            together.wait()
        if "-shared" in command:
            linked.extend(Path(word).stem for word in command if word.endswith(".o"))
        Path(command[-1]).touch()

    monkeypatch.setattr(_compile, "_run", run)
    monkeypatch.setattr(_compile, "_compiler", lambda: "cc")
    assert _compile.build("generic", tmp_path).is_file()
    assert linked == sorted(path.stem for path in _compile._SOURCES.glob("*.c"))


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("level", [*_compile.levels_here(), "none"])
def test_the_level_can_be_chosen(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_native.VARIABLE, level)
    assert _native.cpu_kernels().level == level
    assert (_native.library() is None) == (level == "none")


@pytest.mark.usefixtures("fresh")
def test_an_unknown_level_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_native.VARIABLE, "avx9")
    with pytest.raises(RuntimeError, match="PACELINE_CPU_LEVEL is 'avx9', expected one of"):
        _native.library()


def test_a_compiler_that_fails_is_reported(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = fresh / "cc"
    broken.write_text("#!/bin/sh\necho this compiler is broken >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CC", str(broken))
    with caplog.at_level(logging.WARNING):
        assert _native.library() is None
    assert "this compiler is broken" in caplog.text


def test_a_home_that_cannot_be_written_is_no_obstacle(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = fresh / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    folder = _native._folder()
    assert folder.is_dir()
    assert os.access(folder, os.W_OK)


@pytest.mark.slow
@needs_compiler
def test_a_level_that_differs_from_plain_c_is_not_used(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = _compile.levels_here()[0]
    sources = fresh / "native"
    shutil.copytree(_compile._SOURCES, sources)
    right = (sources / "linear_blocks.h").read_text()
    wrong = right.replace("FORMAT_KERNELS(q8_rows, 0,", "FORMAT_KERNELS(q8_rows, 1,")  # as 4 bits
    assert wrong != right
    (sources / "linear_blocks.h").write_text(wrong)
    monkeypatch.setattr(_compile, "_SOURCES", sources)
    monkeypatch.setenv(_native.VARIABLE, broken)
    with caplog.at_level(logging.WARNING):
        assert _native.cpu_kernels().level == "none"
    assert f"level {broken} are not used: 8-bit blocks differs from plain C" in caplog.text


@pytest.mark.slow
@needs_compiler
@x86_only
def test_libraries_compiled_ahead_need_no_compiler(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _compile.build_ahead(fresh / "prebuilt")
    assert [path.name.split("-")[2] for path in made] == list(_compile.LEVELS)[:-1]
    monkeypatch.setenv("CC", "no-such-compiler")
    for level in _compile.levels_here()[:-1]:
        _native.cpu_kernels.cache_clear()
        monkeypatch.setenv(_native.VARIABLE, level)
        assert (_native.cpu_kernels().level, _native.cpu_kernels().origin) == (level, "the wheel")


@pytest.mark.slow
@needs_compiler
@x86_only
def test_a_library_that_cannot_be_loaded_is_compiled_again(fresh: Path) -> None:
    (fresh / "prebuilt").mkdir()
    level = _compile.levels_here()[0]
    (fresh / "prebuilt" / _compile.file_name(level)).write_bytes(b"for another machine")
    assert _native.cpu_kernels().origin == "compiled on this machine"


def test_the_build_imports_no_torch() -> None:
    found = packages_after(f"import runpy; runpy.run_path({_compile.__file__!r})")
    assert "torch" not in found


@pytest.mark.parametrize("heads", [(6, 2, 24), (4, 1, 8)])
def test_head_sizes_without_whole_vectors_run_on_torch(heads: tuple[int, int, int]) -> None:
    case = make_case(0, 300, (-1, 0, 0, 1), heads)
    torch.testing.assert_close(case.run()[3], case.run_alone(3)[0])


@pytest.mark.skipif(_native.library() is None, reason="no compiled kernels")
def test_a_tensor_of_another_device_is_refused_by_its_name() -> None:
    """C would take its address for one in main memory."""
    elsewhere = torch.empty(64, 64, device="meta")
    packed = pack(torch.zeros(64, 64))
    calls: dict[str, Callable[[], object]] = {
        "logits": lambda: raw_logprobs(elsewhere[0], 0, 0),
        "x": lambda: multiply(elsewhere, packed),
        "values": lambda: replace(packed, values=packed.values.to("meta")).matrix(),
        "a cache": lambda: LayerTable([(elsewhere[None], elsewhere[None])]),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{name} is on meta, expected the CPU"):
            call()
    assert LayerTable.of([(elsewhere[None], elsewhere[None])]) is None


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722])
def test_libraries_are_not_loaded_from_a_folder_of_others(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there could be anybody's code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "paceline" / "kernels"
    assert _native._folder() == folder
    folder.chmod(mode)
    other = _native._folder()
    assert other != folder
    assert other.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    if folder.stat().st_uid:  # root's is taken
        assert _native._folder() != folder
