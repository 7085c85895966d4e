"""Linear layers in C, see ``native/linear.h``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


class Matrix(ctypes.Structure):
    """``Matrix`` of ``native/linear.h``."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("outs", "ins", "format")],
        *[(name, ctypes.c_void_p) for name in ("values", "scales", "minima")],
        *[(name, ctypes.c_int64) for name in ("scales_f16", "offset")],
        ("bias", ctypes.c_void_p),
    ]


class NativeLinear:
    """The compiled linear layers of a library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._scratch = library.paceline_linear_scratch
        self._scratch.argtypes, self._scratch.restype = (pointer, number), number
        self._numerics = library.paceline_linear_numerics
        self._numerics.argtypes, self._numerics.restype = (number,), None
        self._multiply = library.paceline_linear
        self._multiply.argtypes = (pointer, pointer, number, pointer, pointer)
        self._multiply.restype = None

    def set_numerics(self, *, amx: bool) -> None:
        """Multiply bfloat16 in tiles, emulated where the level has none, or portably."""
        self._numerics(amx)

    def multiply(self, x: Tensor, matrix: Matrix) -> Tensor:
        """``x W^T + bias``: float32 ``[rows, ins]`` -> ``[rows, outs]``, dense."""
        rows, at = len(x), ctypes.addressof(matrix)
        out = torch.empty(rows, matrix.outs)
        scratch = torch.empty(self._scratch(at, rows), dtype=torch.uint8)
        self._multiply(at, x.data_ptr(), rows, scratch.data_ptr(), out.data_ptr())
        return out
