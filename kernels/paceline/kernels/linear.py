"""Linear layers on the CPU over weights that are packed once, see ``native/linear.h``.

The bits of an output depend on its own row and its weights only: not on the other rows, their
number, the threads or the level of the processor.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from paceline.kernels._native import address, library
from paceline.kernels.quantised import QUANT_BLOCK, QuantisedMatrix
from paceline.kernels.rotated import RotatedMatrix
from paceline.kernels.structures import CMatrix

ALIGNMENT = 64  # bytes; a cache line
_CHUNK = 32 << 20
_HUGE = 2 << 20
_ROWS = 64
PANEL = 16
_PADDED = 2 * PANEL
_ROTATED = 64  # inputs that rotated weights are padded to
# Formats of packed weights, in the order of the C kernels: int8 and int4 are in blocks of 32,
# rotated is `paceline.kernels.rotated`.
FORMATS = ("float32", "bfloat16", "int8", "int4", "rotated")
_BLOCKS = f"exact sums of {QUANT_BLOCK} inputs, in a chain of FMAs over blocks"
# How each adds up a product, in rising order of the inputs: `native/linear.h` has all of it.
_SUMS = ("chain of FMAs", "chain of FMAs", _BLOCKS, _BLOCKS, "exact sum of all inputs")
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _Chunks:
    """Cuts tensors from chunks of anonymous memory; a chunk is freed with its last tensor.

    One system page a tensor would keep matrices below 2 MiB off huge pages, and a step that reads
    all weights would miss the address cache on each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> Tensor:
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if padded > len(self._chunk):
                self._chunk = _map(max(padded, _CHUNK))
            tensor, self._chunk = self._chunk[:size], self._chunk[padded:]
        return tensor


def _map(size: int) -> Tensor:
    """uint8 zeros that start at a multiple of a huge page."""
    # Shared memory, the default, gets no huge pages on most systems.
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # a kernel or system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    return whole[start : start + size]


# `allocate(size) -> Tensor`: uint8 zeros `[size]` at a multiple of `ALIGNMENT`.
allocate = _Chunks().allocate


def multiply_natively(native: ctypes.CDLL, x: Tensor, matrix: ctypes.Structure) -> Tensor:
    """``x W^T + bias`` by compiled kernels: float32 ``[rows, ins]`` to ``[rows, outs]``, dense."""
    rows, at = len(x), ctypes.addressof(matrix)
    out = torch.empty(rows, matrix.outs)
    scratch = torch.empty(native.paceline_linear_scratch(at, rows), dtype=torch.uint8)
    native.paceline_linear(at, address(x, "x"), rows, scratch.data_ptr(), out.data_ptr())
    return out


def multiply_floats(
    x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int] = (_ROWS,)
) -> Tensor:
    """``x W^T + bias`` in products of so many rows: BLAS picks its kernel by their number.

    ``sizes`` rise. Inputs are cut in pieces of the largest, and a piece is padded with zeros to the
    next size.
    """
    rows, outs = len(x), []
    for part in x.split(sizes[-1]):
        size = next(size for size in sizes if size >= len(part))
        if size > len(part):
            part = pad(part, (0, 0, 0, size - len(part)))
        outs.append(linear(part, weight, bias))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if len(out) == rows else out[:rows]


@dataclass(frozen=True)
class PackedMatrix:
    """The weights of a linear layer as the kernels read them."""

    format: str  # one of `FORMATS`
    outs: int  # number of outputs
    ins: int  # number of inputs
    values: Tensor  # packed weights, uint8, at a multiple of 64 bytes
    bias: Tensor | None = None  # float32 `[outs]`, or None
    offset: int = 0  # subtracted from the stored values of "int8" and "int4"
    minima: bool = False  # whether blocks of "int8" and "int4" have minima
    scales_f16: bool = False  # whether their scales and minima are float16, else float32
    rotation: int = 0  # inputs of "rotated" that are rotated together; 0: of other formats

    def __post_init__(self) -> None:
        for name, tensor in self.tensors().items():
            if tensor.data_ptr() % ALIGNMENT or not tensor.is_contiguous():
                raise ValueError(f"{name} must be dense at a multiple of {ALIGNMENT} bytes")

    @property
    def shape(self) -> tuple[int, int]:
        """``(outs, ins)``."""
        return self.outs, self.ins

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, without those that are None."""
        named = {"values": self.values, "bias": self.bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def rows(self, indices: Tensor) -> Tensor:
        """Return the weights of some outputs, int64 ``[n]``: float32 ``[n, ins]``. Raises
        ``IndexError``: there is no such output."""
        indices = indices.contiguous()
        at, which = address(indices, "indices"), indices.numpy()
        if len(which) and not 0 <= which.min() <= which.max() < self.outs:
            raise IndexError(f"an index is outside of the {self.outs} outputs of a matrix")
        rows, matrix = torch.empty(len(which), self.ins), self.matrix()
        library().paceline_rows(ctypes.addressof(matrix), at, len(which), rows.data_ptr())
        return rows

    def arithmetic(self, numerics: str) -> tuple[str, str, dict[str, str]]:
        """Return what the bits of its products depend on besides weights and inputs, in some
        numerics: the format, the order of sums, and constants."""
        sums = _SUMS[FORMATS.index(self.format)]
        if self.format == "bfloat16" and self.matrix(numerics).tiles_bf16:
            sums = "sums of TDPBF16PS, inputs rounded to bfloat16"
        facts = {"offset": self.offset, "minima": int(self.minima), "rotation": self.rotation}
        return self.format, sums, {name: str(value) for name, value in facts.items() if value}

    def matrix(self, numerics: str = "portable") -> ctypes.Structure:
        """Return the argument of the C kernels, for products in some numerics. It is valid as long
        as this object lives."""
        fields = {name: address(tensor, name) for name, tensor in self.tensors().items()}
        alike = ("outs", "ins", "minima", "scales_f16", "offset", "rotation")
        fields |= {name: getattr(self, name) for name in alike}
        return CMatrix(**fields, format=FORMATS.index(self.format), tiles_bf16=numerics == "amx")


def pack(weight: Tensor, bias: Tensor | None = None, format: str = "bfloat16") -> PackedMatrix:
    """Pack a weight matrix ``[outs, ins]`` of any floating type, and a bias ``[outs]`` of any, or
    None. ``format`` is "float32" or "bfloat16": other weights are rounded to it. Raises
    ``ValueError``: another format."""
    if format not in _TYPES:
        raise ValueError(f"format is {format!r}, expected float32 or bfloat16")
    outs, ins = weight.shape
    # A bfloat16 line holds pairs of inputs, which move as one number of 4 bytes.
    words = _padded(weight.to(_TYPES[format]), QUANT_BLOCK).view(torch.int32)
    count = words.shape[1]
    packed = allocate(words.nbytes)
    panels = packed.view(torch.int32).view(-1, count, PANEL)
    panels.copy_(words.view(-1, PANEL, count).transpose(1, 2))
    return PackedMatrix(format, outs, ins, packed, _bias(bias))


def pack_quantised(blocks: QuantisedMatrix, bias: Tensor | None = None) -> PackedMatrix:
    """Pack a quantised matrix; ``bias`` is ``[outs]`` of any floating type, or None.

    Scales and minima are stored as float16 if that changes none of them, else as float32.
    """
    outs, ins = blocks.shape
    count = ins // QUANT_BLOCK
    words = _padded(blocks.values, QUANT_BLOCK).view(torch.int32)
    if blocks.bits == 4:
        words = words[:, 0::2] | words[:, 1::2] << 4
    factors = [t for t in (blocks.scale, blocks.minimum) if t is not None]
    half = all(torch.equal(t.half().float(), t) for t in factors)
    size, factor = 4 * words[0].numel() // count * _PADDED, (2 if half else 4) * _PADDED
    pairs = len(words) // _PADDED
    packed = allocate(pairs * count * (size + factor * len(factors)))
    pieces = packed.view(pairs, count, -1)
    panels = words.view(pairs, 2, PANEL, count, -1).permute(0, 3, 1, 4, 2).contiguous()
    with torch.inference_mode():  # `packed` may be a part of an inference tensor
        pieces[:, :, :size] = panels.view(torch.uint8).view(pairs, count, size)
        for at, tensor in enumerate(factors):
            values = _padded(tensor.half() if half else tensor, 1).view(pairs, _PADDED, count)
            part = slice(size + factor * at, size + factor * (at + 1))
            pieces[:, :, part] = values.transpose(1, 2).contiguous().view(torch.uint8)
    return PackedMatrix(
        "int8" if blocks.bits == 8 else "int4", outs, ins, packed, _bias(bias), blocks.offset,
        minima=len(factors) > 1, scales_f16=half,
    )  # fmt: skip


def pack_rotated(matrix: RotatedMatrix, bias: Tensor | None = None) -> PackedMatrix:
    """Pack a matrix in 8-bit integers over rotated inputs; ``bias`` is ``[outs]`` of any floating
    type, or None. Both are on the CPU."""
    outs, ins = matrix.shape
    values = matrix.values[:outs].view(torch.uint8) ^ 128
    words = pad(values, (0, -ins % _ROTATED, 0, -outs % _PADDED), value=128).view(torch.int32)
    pairs, count = len(words) // _PADDED, words.shape[1]
    packed = allocate(pairs * _PADDED * 4 * (count + 1))
    pieces = packed.view(torch.int32).view(pairs, count + 1, _PADDED)
    scales = pad(matrix.scale, (0, -outs % _PADDED)).view(torch.int32)
    with torch.inference_mode():  # `packed` may be a part of an inference tensor
        pieces[:, :-1] = words.view(pairs, _PADDED, count).transpose(1, 2)
        pieces[:, -1] = scales.view(pairs, _PADDED)
    return PackedMatrix("rotated", outs, ins, packed, _bias(bias), rotation=matrix.size)


def multiply(x: Tensor, packed: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + bias`` of dense float32 ``[rows, ins]`` on the CPU: float32 ``[rows,
    outs]``. A dense float32 ``bias`` ``[outs]`` replaces ``packed``'s. Raises ``ValueError`` if
    ``x`` or ``bias`` has another shape or type."""
    if x.dtype is not torch.float32 or x.shape[1:] != (packed.ins,) or not x.is_contiguous():
        actual = f"{x.dtype} {list(x.shape)}"
        raise ValueError(f"x is {actual}, expected dense float32 [rows, {packed.ins}]")
    if bias is None:
        bias = packed.bias
    elif bias.dtype is not torch.float32 or bias.shape != (packed.outs,) or bias.stride(0) != 1:
        actual = f"{bias.dtype} {list(bias.shape)}"
        raise ValueError(f"bias is {actual}, expected dense float32 [{packed.outs}]")
    if not len(x):
        return torch.empty(0, packed.outs)
    matrix = packed.matrix()
    if bias is not None:
        matrix.bias = address(bias, "bias")
    return multiply_natively(library(), x, matrix)


def _padded(rows: Tensor, multiple: int) -> Tensor:
    """Zeros added: rows up to two panels, columns up to ``multiple``."""
    outs, ins = rows.shape
    if outs % _PADDED == ins % multiple == 0:
        return rows.contiguous()
    return pad(rows, (0, -ins % multiple, 0, -outs % _PADDED))


def _bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else allocate(4 * len(bias)).view(torch.float32).copy_(bias)
