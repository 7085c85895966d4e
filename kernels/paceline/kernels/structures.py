"""The structures and limits that Python shares with the compiled kernels, read from their headers.

A library is named by a digest of its sources (:mod:`paceline.kernels._compile`): what is
read here is what it was compiled from.
"""

from __future__ import annotations

import ctypes
import keyword
import re
from collections.abc import Sequence
from typing import Any

from paceline.kernels._compile import SOURCES

_HEADERS = ("limits.h", "vectors.h", "attention.h", "linear.h", "delta.h", "program.h", "draft.h")
_TYPES = {"int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "double": ctypes.c_double}
SUMS = ("chains of FMAs", "sums of TDPBF16PS", "sums of VDPBF16PS")  # by the codes of `PRODUCTS`


def _text(header: str) -> str:
    """Return a header without its comments."""
    return re.sub(r"/\*.*?\*/", "", (SOURCES / header).read_text(), flags=re.DOTALL)


_TEXT = "".join(map(_text, _HEADERS))
# Declarations of the fields of each structure.
FIELDS = {name: fields for fields, name in re.findall(r"typedef struct \{([^}]*)\} (\w+);", _TEXT)}

# Numbers of enumerations by their names: of kinds of operations, and of products of attention.
CODES = {
    name: code
    for names in re.findall(r"enum \{([^}]*)\};", _TEXT)
    for code, name in enumerate(re.findall(r"\w+", names))
}

# By their names in `native/limits.h`.
LIMITS = {
    name: int(value) for name, value in re.findall(r"#define (\w+) +(\d+) *\n", _text("limits.h"))
}

LANES = LIMITS["WIDTH"]  # widths in memory must be multiples of this
MAX_HEAD_DIM = LIMITS["MAX_DIM"]
MAX_TAPS = LIMITS["MAX_TAPS"]
MAX_ROTATED_INS, MAX_ROTATION = LIMITS["MAX_ROTATED_INS"], LIMITS["MAX_ROTATION"]
QUERY_TILE_ROWS = LIMITS["QUERY_TILE_ROWS"]

# How attention multiplies bfloat16 caches, by numerics.
PRODUCTS = {"portable": CODES["CHAINS"], "amx": CODES["TILES"], "avx512_bf16": CODES["DOTS"]}


def fields_of(structure: str) -> list[tuple[str, Any]]:
    """Return a structure's fields for ctypes, in order; Python's words end in ``_`` there."""
    fields: list[tuple[str, Any]] = []
    for declaration in FIELDS[structure].split(";")[:-1]:
        (kind, _), *names = re.findall(r"(\w+)(?:\[(\w+)\])?", declaration.replace("const", ""))
        of: Any = ctypes.c_void_p if "*" in declaration else _TYPES[kind]
        for name, length in names:
            name += "_" * keyword.iskeyword(name)
            fields.append((name, of * LIMITS[length] if length else of))
    return fields


def _shared(structure: str) -> type[ctypes.Structure]:
    """Return a structure of a header, as a class for ctypes."""
    return type(structure, (ctypes.Structure,), {"_fields_": fields_of(structure)})


CCache, CQueryBlock, CProbe, CProbes, CQueries = map(
    _shared, ("Cache", "QueryBlock", "Probe", "Probes", "Queries")
)
CMatrix, CDelta, CStates, CModel = map(_shared, ("Matrix", "Delta", "States", "Model"))
COperation, CBuffer, CProgram, CRun = map(_shared, ("Operation", "Buffer", "Program", "Run"))


class DraftText(ctypes.Structure):
    """A text that is drafted for, and its tree: ``Text`` of ``native/draft.h``."""

    _fields_ = fields_of("Text")

    def set_widths(self, widths: Sequence[int]) -> None:
        """Set the numbers of nodes of the levels; the last one is of all deeper levels."""
        self.levels = min(len(widths), LIMITS["MAX_NODES"])
        self.width[: self.levels] = widths[: self.levels]
