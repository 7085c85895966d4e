"""Compiling and finding the CPU kernels, and what happens where that cannot be done."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from programs import packages_after

from paceline.kernels import KernelsError, LayerTable, _compile, _native, raw_logprobs
from paceline.kernels.linear import multiply, pack

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
x86_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="compiled ahead for x86-64")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, no libraries of a wheel, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(_native.VARIABLE, raising=False)
    monkeypatch.setattr(_compile, "PREBUILT", tmp_path / "prebuilt")
    _native._load_kernels.cache_clear()
    yield tmp_path
    _native._load_kernels.cache_clear()


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
    _native._load_kernels.cache_clear()
    assert _native.library() is not None
    assert {path: path.stat().st_mtime_ns for path in fresh.rglob("*")} == before


@pytest.mark.parametrize("compiler", ["no-such-compiler", "broken"])
def test_without_a_compiler_the_error_names_both_ways_out(
    compiler: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = fresh / "broken"
    broken.write_text("#!/bin/sh\necho this compiler is broken >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CC", str(fresh / compiler))
    reasons = {"no-such-compiler": "there is no C compiler", "broken": "this compiler is broken"}
    with pytest.raises(KernelsError, match=f"(?s){reasons[compiler]}.*[Ii]nstall gcc.*CC.*a wheel"):
        _native.library()
    done = subprocess.run(
        [sys.executable, "-m", "paceline.kernels"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert reasons[compiler] in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("fresh")
def test_an_unknown_level_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_native.VARIABLE, "avx9")
    with pytest.raises(KernelsError, match="PACELINE_CPU_LEVEL is 'avx9', expected one of"):
        _native.library()


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
    shutil.copytree(_compile.SOURCES, sources)
    right = (sources / "linear_blocks.h").read_text()
    wrong = right.replace("FORMAT_KERNELS(q8_f16, 0,", "FORMAT_KERNELS(q8_f16, 1,")  # as 4 bits
    assert wrong != right
    (sources / "linear_blocks.h").write_text(wrong)
    monkeypatch.setattr(_compile, "SOURCES", sources)
    monkeypatch.setenv(_native.VARIABLE, broken)
    with pytest.raises(KernelsError, match="every level differ from plain C"):
        _native.cpu_kernels()
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
        _native._load_kernels.cache_clear()
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
