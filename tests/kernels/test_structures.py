"""The border between Python and C: what Python reads in the headers is what a compiler reads."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.kernels import structures
from paceline.kernels._compile import SOURCES
from paceline.kernels.operations import OPERATIONS
from paceline.kernels.program import Kind

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")


@needs_gcc
def test_both_sides_mean_the_same(tmp_path: Path) -> None:
    lines = ["#include <stddef.h>", '#include "draft.h"']
    known: dict[str, type[ctypes.Structure]] = {
        name: vars(structures)[f"C{name}"]
        for name in structures.FIELDS
        if f"C{name}" in vars(structures)
    }
    known |= {"Cache": structures.CPlane, "Text": structures.DraftText}
    assert len(known) == 14
    for name, structure in known.items():
        facts = {f"sizeof({name})": ctypes.sizeof(structure)}
        for field, *_ in structure._fields_:
            placed = getattr(structure, field)
            facts[f"offsetof({name}, {field.rstrip('_')})"] = placed.offset
            facts[f"sizeof((({name} *)0)->{field.rstrip('_')})"] = placed.size
        lines += [f'_Static_assert({fact} == {n}, "{fact}");' for fact, n in facts.items()]
    numbers = structures.CODES | structures.LIMITS
    lines += [f'_Static_assert({name} == {n}, "{name}");' for name, n in numbers.items()]
    lines += ['_Static_assert(MAX_NODES == MAX_TREE_NODES - 1, "all but the anchor");']
    (tmp_path / "border.c").write_text("\n".join(lines))
    command = ["gcc", "-fsyntax-only", "-std=gnu11", "-fopenmp", f"-I{SOURCES}", "border.c"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


CALL = """
import ctypes
from paceline.kernels import cpu_kernels
from paceline.kernels.structures import CMatrix
matrix = CMatrix(outs=0, ins=32, format=0)
cpu_kernels().library.paceline_linear(ctypes.addressof(matrix), None, 1, None, None)
print("no check")
"""


@pytest.mark.slow
@needs_gcc
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
    assert all(kind.name in structures.CODES for kind in Kind)
