"""The structures that Python and the compiled kernels share, and a check that both mean the same.

Each class here mirrors a structure of the headers in ``native/``. When a library is loaded, the
size of each structure and the offset and size of each field are compared with those that the C
compiler chose, and the limits of both sides with each other: a field that was added on one side
alone is an error at load, not a wrong address later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from paceline.kernels.trees import CHUNK, MAX_TREE_NODES

LANES = 16
"""Widths in memory must be multiples of this."""

MAX_HEAD_DIM = 512
"""Values of a head in compiled programs."""

MAX_TAPS = 8
"""Positions that the convolution of the delta rule reads."""

MAX_DRAFTED_NODES = MAX_TREE_NODES - 1
"""Nodes of a drafted tree, without the anchor."""

MAX_ROTATED_INS = (2**31 - 1) // (255 * 127)
"""Inputs of linear layers in 8-bit integers without blocks: their sums fit an int32, of products
with unsigned inputs too."""

MAX_ROTATION = 512
"""Inputs that such layers rotate together."""

QUERY_TILE_ROWS = 128
"""Query rows of a tile: its scores of a chunk fit a core's cache, and keys are converted once for
many rows."""


class Code(IntEnum):
    """Kinds of operations of compiled programs, as ``native/program.h`` numbers them."""

    EMBED = 0
    INPUT = 1
    ADD_NORM = 2
    MULTIPLY = 3
    ROTATE = 4
    ATTEND = 5
    ATTEND_CONTEXT = 6
    GATE = 7
    ADD = 8
    TAP = 9
    SELECT = 10
    CAP = 11
    ROUTE = 12
    SPREAD = 13
    COMBINE = 14
    DELTA = 15
    SIGMOID_GATE = 16
    CONVOLVE = 17


class Products(IntEnum):
    """How attention multiplies bfloat16 caches, as ``native/attention.h`` numbers it."""

    CHAINS = 0
    TILES = 1
    DOTS = 2


PRODUCTS = {
    "portable": Products.CHAINS,
    "amx": Products.TILES,
    "avx512_bf16": Products.DOTS,
}
"""By numerics."""


def _numbers(*names: str) -> list[tuple[str, Any]]:
    """Fields of int64."""
    return [(name, ctypes.c_int64) for name in names]


def _pointers(*names: str) -> list[tuple[str, Any]]:
    """Fields that are addresses."""
    return [(name, ctypes.c_void_p) for name in names]


def _floats(*names: str) -> list[tuple[str, Any]]:
    """Fields of double precision."""
    return [(name, ctypes.c_double) for name in names]


class CPlane(ctypes.Structure):
    """``Cache`` of ``native/vectors.h``: keys or values of a layer."""

    _fields_ = [*_pointers("data"), *_numbers("head_stride", "slot_stride", "slots")]


class CQueryBlock(ctypes.Structure):
    """``QueryBlock`` of ``native/attention.h``."""

    _fields_ = [
        *_numbers("sequence", "start", "length", "row"),
        *_pointers("depths", "paths", "path_starts"),
    ]


class CProbe(ctypes.Structure):
    """``Probe`` of ``native/attention.h``."""

    _fields_ = [*_numbers("block", "node", "weights", "stride"), *_pointers("out")]


class CProbes(ctypes.Structure):
    """``Probes`` of ``native/attention.h``."""

    _fields_ = [*_numbers("count"), *_pointers("probe")]


class CMatrix(ctypes.Structure):
    """``Matrix`` of ``native/linear.h``."""

    _fields_ = [
        *(*_numbers("outs", "ins", "format"), *_pointers("values")),
        *_numbers("minima", "scales_f16", "offset", "rotation"),
        *(*_pointers("bias"), *_numbers("tiles_bf16")),
    ]


class CDelta(ctypes.Structure):
    """``Delta`` of ``native/delta.h``."""

    _fields_ = [
        *_numbers("key_heads", "value_heads", "key_dim", "value_dim", "taps"),
        *(*_pointers("convolution", "rates", "bias", "norm"), *_floats("eps")),
    ]


class CStates(ctypes.Structure):
    """``States`` of ``native/delta.h``."""

    _fields_ = [
        *_numbers("start", "replayed", "from_rows", "to_rows"),
        *_pointers("from_", "from_window", "from_log", "to", "to_window", "to_log"),
    ]


class COperation(ctypes.Structure):
    """``Operation`` of ``native/program.h``."""

    _fields_ = [
        *_numbers("kind", "source", "delta", "out", "layer", "window", "q_heads", "kv_heads"),
        *_numbers("bf16", "rope", "whole", "gelu", "experts", "among"),
        *(*_pointers("weight", "second"), *_floats("eps", "factor", "limit")),
    ]


class CBuffer(ctypes.Structure):
    """``Buffer`` of ``native/program.h``."""

    _fields_ = _numbers("width", "extent")


class CProgram(ctypes.Structure):
    """``Program`` of ``native/program.h``."""

    _fields_ = [
        *(*_numbers("operations", "selecting"), *_pointers("operation")),
        *(*_numbers("buffers"), *_pointers("buffer")),
        *_numbers("vocabulary", "q_heads", "kv_heads", "dim", "top", "products"),
        *_floats("scale", "cap"),
    ]


class CQueries(ctypes.Structure):
    """``Queries`` of ``native/program.h``."""

    _fields_ = [*_numbers("count"), *_pointers("row", "out")]


class CRun(ctypes.Structure):
    """``Run`` of ``native/program.h``."""

    _fields_ = [
        *(*_numbers("rows", "selected", "threads"), *_pointers("tokens", "position")),
        *(*_pointers("selection", "table"), *_numbers("table_rows", "sequences")),
        *_pointers("caches"),
        *(*_numbers("kv_type", "blocks"), *_pointers("block", "contexts", "context_block")),
        *(*_numbers("context_type"), *_pointers("inputs"), *_numbers("inputs_bf16")),
        *(*_numbers("tiles"), *_pointers("tile", "logits", "taps"), *_numbers("taps_bf16")),
        *_pointers("probes", "queries", "states", "committed", "nanoseconds", "memory"),
    ]


class CModel(ctypes.Structure):
    """``Model`` of ``native/draft.h``."""

    _fields_ = [
        *(*_pointers("context", "block"), *_numbers("length", "levels", "hidden", "states")),
        *(*_pointers("text"), *_numbers("state_input", "bf16", "kv_type", "mask", "drafted")),
        *(*_pointers("ids"), *_numbers("rank"), *_pointers("w1", "w2", "confidence", "offsets")),
        *_pointers("temperatures"),
    ]


class DraftText(ctypes.Structure):
    """A text that is drafted for, and its tree: ``Text`` of ``native/draft.c``.

    Attributes:
        context: Address of the context's table; see :class:`~paceline.kernels.LayerTable`.
        base: Position in the context's first slot, a multiple of ``CHUNK``.
        first: First position whose states, or token, are new.
        length: Position of the anchor, the text's newest token; with a :class:`StateText` its slot,
            which is that of the position before.
        fresh: Address of the new states, ``[length - first, states]`` of a block model, ``[length +
            1 - first, states]`` of a :class:`StateText`.
        tokens: Address of other models' new tokens, int64 ``[length + 1 - first]``.
        newest: Address of memory for a block model's states of the newest position; kept between
            calls.
        target: Address of the table of the target's keys and values, if the model reads them.
        slots: Number of their slots.
        anchor: The newest token.
        row: Its row of W1.
        count: Number of logits of which candidates are taken, the first ones.
        temperature: Scores are ``logits / temperature + noise``; 0: the logits.
        seed: Of the noise.
        nodes: Maximum number of nodes.
        depth: Maximum length of a path.
        levels: Numbers in ``width``; see :meth:`set_widths`.
        width: Numbers of nodes of the levels.
        min_score: Nodes with a lower log of the survival are not expanded.
        drafted: Number of nodes of the tree, which are sorted by falling survival.
        token: Token ids of the nodes.
        parent: Their parents; -1: the anchor.
        chance: Their confidences.
    """

    _fields_ = [
        *(
            *_pointers("context"),
            *_numbers("base", "first", "length"),
            *_pointers("fresh", "tokens"),
        ),
        *(*_pointers("newest", "target"), *_numbers("slots")),
        *(*_numbers("anchor", "row", "count"), ("temperature", ctypes.c_double)),
        *(("seed", ctypes.c_uint64), *_numbers("nodes", "depth", "levels")),
        ("width", ctypes.c_int64 * MAX_DRAFTED_NODES),
        *(("min_score", ctypes.c_double), *_numbers("drafted")),
        ("token", ctypes.c_int64 * MAX_DRAFTED_NODES),
        ("parent", ctypes.c_int64 * MAX_DRAFTED_NODES),
        ("chance", ctypes.c_double * MAX_DRAFTED_NODES),
    ]

    def set_widths(self, widths: Sequence[int]) -> None:
        """Set the numbers of nodes of the levels; the last one is of all deeper levels."""
        self.levels = min(len(widths), MAX_DRAFTED_NODES)
        self.width[: self.levels] = widths[: self.levels]


STRUCTURES: Mapping[str, type[ctypes.Structure]] = {
    "Cache": CPlane,
    "QueryBlock": CQueryBlock,
    "Probe": CProbe,
    "Probes": CProbes,
    "Matrix": CMatrix,
    "Delta": CDelta,
    "States": CStates,
    "Operation": COperation,
    "Buffer": CBuffer,
    "Program": CProgram,
    "Queries": CQueries,
    "Run": CRun,
    "Model": CModel,
    "Text": DraftText,
}
"""By their names in C."""

LIMITS: Mapping[str, int] = {
    "WIDTH": LANES,
    "MAX_DIM": MAX_HEAD_DIM,
    "MAX_TREE_NODES": MAX_TREE_NODES,
    "MAX_NODES": MAX_DRAFTED_NODES,
    "MAX_TAPS": MAX_TAPS,
    "MAX_ROTATED_INS": MAX_ROTATED_INS,
    "MAX_ROTATION": MAX_ROTATION,
    "QUERY_TILE_ROWS": QUERY_TILE_ROWS,
    "CHUNK": CHUNK,
    **{code.name: code.value for code in (*Code, *Products)},
}
"""By their names in ``native/limits.h``, and the codes of operations in ``native/program.h`` and of
products in ``native/attention.h``."""


def layout_of(structure: type[ctypes.Structure]) -> list[int]:
    """Size of a structure, then offset and size of each of its fields. Unit: bytes."""
    fields = [getattr(structure, field[0]) for field in structure._fields_]
    return [ctypes.sizeof(structure), *(n for each in fields for n in (each.offset, each.size))]


def why_different(library: ctypes.CDLL) -> str:
    """Why a loaded library does not share these structures and limits; empty if it does."""
    for name, structure in STRUCTURES.items():
        ours, theirs = layout_of(structure), _told(library.paceline_layout, name)
        if ours == theirs:
            continue
        fields = [field[0] for field in structure._fields_]
        at = _first_difference(ours, theirs)
        place = f"field {fields[(at - 1) // 2]!r}" if 0 < at < len(ours) else "its end"
        return (
            f"structure {name} of the compiled kernels has {theirs[0] if theirs else 'no'} bytes, "
            f"{structure.__name__} has {ours[0]}; they differ first at {place}"
        )
    for name, limit in LIMITS.items():
        if (found := library.paceline_limit(name.encode())) != limit:
            return f"limit {name} of the compiled kernels is {found}, expected {limit}"
    return ""


def _told(layout: Any, name: str) -> list[int]:
    numbers = (ctypes.c_int64 * 64)()
    count = layout(name.encode(), numbers, len(numbers))
    return numbers[:count]


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = zip(ours[1:], theirs[1:], strict=False)
    same = next((at for at, (a, b) in enumerate(pairs, 1) if a != b), 0)
    return same or min(len(ours), len(theirs))
