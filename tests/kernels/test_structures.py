"""The border between Python and C: both sides must mean the same structures and limits."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.kernels import cpu_kernels, structures
from paceline.kernels.operations import OPERATIONS
from paceline.kernels.program import Kind

NATIVE = Path(structures.__file__).parent / "native"


@pytest.fixture
def library() -> ctypes.CDLL:
    """The loaded kernels."""
    return cpu_kernels().library


def test_both_sides_mean_the_same(library: ctypes.CDLL) -> None:
    assert structures.why_different(library) == ""


@pytest.mark.parametrize("name", structures.STRUCTURES)
@pytest.mark.parametrize("change", ["a field more", "a field less", "another type"])
def test_a_structure_that_differs_is_named(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, name: str, change: str
) -> None:
    fields: list[tuple[str, Any]] = list(structures.STRUCTURES[name]._fields_)
    if change == "a field more":
        fields.append(("unknown", ctypes.c_int64))
    elif change == "a field less":
        fields.pop()
    else:
        fields[0] = (fields[0][0], ctypes.c_int32 * 4)
    other = type("Other", (ctypes.Structure,), {"_fields_": fields})
    monkeypatch.setitem(structures.STRUCTURES, name, other)  # type: ignore[arg-type]
    assert structures.why_different(library).startswith(f"structure {name} of the compiled")


@pytest.mark.parametrize("name", structures.LIMITS)
def test_a_limit_that_differs_is_named(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    right = structures.LIMITS[name]
    monkeypatch.setitem(structures.LIMITS, name, right + 1)  # type: ignore[arg-type]
    expected = f"limit {name} of the compiled kernels is {right}, expected {right + 1}"
    assert structures.why_different(library) == expected


def test_every_structure_of_the_table_is_mirrored(library: ctypes.CDLL) -> None:
    """abi.c must not list a structure that Python does not compare."""
    lines = (NATIVE / "abi.c").read_text().split("STRUCTURE(")[2:]  # behind its definition
    assert [line.partition(")")[0] for line in lines] == list(structures.STRUCTURES)


CALL = """
import ctypes
from paceline.kernels import cpu_kernels
from paceline.kernels.structures import CMatrix
matrix = CMatrix(outs=0, ins=32, format=0)
cpu_kernels().library.paceline_linear(ctypes.addressof(matrix), None, 1, None, None)
print("no check")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_a_debug_build_ends_at_a_wrong_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for sanitizers, checked in (("", False), ("undefined", True)):
        monkeypatch.setenv("PACELINE_SANITIZE", sanitizers)
        runtime = ["gcc", "-print-file-name=libubsan.so"]
        preload = subprocess.run(runtime, capture_output=True, text=True, check=True).stdout.strip()
        monkeypatch.setenv("LD_PRELOAD", preload if checked else "")
        done = subprocess.run(
            [sys.executable, "-c", CALL], capture_output=True, text=True, check=False
        )
        assert ("no check" in done.stdout) != checked, done.stderr
        assert ("m->outs > 0" in done.stderr) == checked, done.stderr


def test_every_kind_of_operation_runs_both_ways() -> None:
    assert list(OPERATIONS) == list(Kind)
    assert sorted(each.code for each in OPERATIONS.values()) == list(structures.Code)
