"""The border between Python and C: what Python reads in the headers is what a compiler reads."""

import ctypes
import shutil
import subprocess
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
    known["Text"] = structures.DraftText
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


def test_every_kind_of_operation_runs_both_ways() -> None:
    assert OPERATIONS.keys() == set(Kind) - {Kind.DELTA}  # GPUs do not have it
    assert all(kind.name in structures.CODES for kind in Kind)
