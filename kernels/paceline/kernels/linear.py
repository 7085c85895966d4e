"""Linear layers on the CPU over weights that are packed once, see ``native/linear.h``.

The bits of an output depend on its own row and its weights only: not on the other rows, their
number, the threads or the level of the processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from paceline.kernels._native import library
from paceline.kernels._native_linear import Matrix, NativeLinear
from paceline.kernels._torch_linear import multiply_blocks, multiply_floats
from paceline.kernels.blocks import BLOCK, Blocks
from paceline.kernels.memory import ALIGNMENT, allocate

PANEL = 16
_PADDED = 2 * PANEL
FORMATS = ("float32", "bfloat16", "int8", "int4")
"""Formats of packed weights, in the order of the C kernels."""

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class PackedMatrix:
    """The weights of a linear layer as the kernels read them.

    Attributes:
        format: One of ``FORMATS``.
        outs: Outputs.
        ins: Inputs.
        values: Packed weights, uint8, at a multiple of 64 bytes.
        scales: Packed, float16 or float32; None for "float32" and "bfloat16".
        minima: Packed, of the type of ``scales``, or None.
        bias: float32 ``[outs]``, or None.
        offset: Subtracted from the stored values of "int8" and "int4".
    """

    format: str
    outs: int
    ins: int
    values: Tensor
    scales: Tensor | None = None
    minima: Tensor | None = None
    bias: Tensor | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        for name, tensor in self.tensors().items():
            if tensor.data_ptr() % ALIGNMENT or not tensor.is_contiguous():
                raise ValueError(f"{name} must be dense at a multiple of {ALIGNMENT} bytes")

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, without those that are None."""
        named = {"values": self.values, "scales": self.scales, "minima": self.minima}
        return {k: v for k, v in (named | {"bias": self.bias}).items() if v is not None}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> PackedMatrix:
        """The same matrix on other memory: copies of ``tensors()``, for example mapped ones.

        Raises:
            ValueError: A tensor is not dense at a multiple of 64 bytes.
        """
        get = tensors.get
        values, scales, minima = tensors["values"], get("scales"), get("minima")
        return replace(self, values=values, scales=scales, minima=minima, bias=get("bias"))

    @cached_property
    def unpacked(self) -> Tensor | Blocks:
        """The weights in their usual order: float32 ``[outs, ins]``, or blocks."""
        return self._unpack(slice(None))

    def rows(self, indices: Tensor) -> Tensor:
        """The weights of some outputs, int64 ``[n]``: float32 ``[n, ins]``."""
        found = self._unpack(indices)
        return found.dequantise() if isinstance(found, Blocks) else found

    def _unpack(self, which: Tensor | slice) -> Tensor | Blocks:
        words = self._rows(self.values.view(torch.int32), which)
        if self.scales is None:
            return words.view(_TYPES[self.format])[:, : self.ins].float()
        if self.format == "int4":
            both = torch.stack([words & 0x0F0F0F0F, words >> 4 & 0x0F0F0F0F], 2)
            words = both.flatten(1)
        scale = self._rows(self.scales, which).float()
        minimum = None if self.minima is None else self._rows(self.minima, which).float()
        bits = 8 if self.format == "int8" else 4
        return Blocks(words.view(torch.uint8), scale, minimum, bits, self.offset)

    def _rows(self, panels: Tensor, which: Tensor | slice) -> Tensor:
        """``[outs / 16][n][16]`` -> ``[outs, n]``, of some outputs."""
        found = panels.view(-(-self.outs // _PADDED) * 2, -1, PANEL)
        if isinstance(which, Tensor):
            return found[which // PANEL, :, which % PANEL]
        return found.transpose(1, 2).flatten(0, 1)[: self.outs][which]

    def matrix(self) -> Matrix:
        """The argument of the C kernels; valid as long as this object lives."""
        address = {name: tensor.data_ptr() for name, tensor in self.tensors().items()}
        return Matrix(
            outs=self.outs,
            ins=self.ins,
            format=FORMATS.index(self.format),
            scales_f16=self.scales is not None and self.scales.dtype is torch.float16,
            offset=self.offset,
            **address,
        )


def pack(weight: Tensor, bias: Tensor | None = None, format: str = "bfloat16") -> PackedMatrix:
    """Pack a weight matrix of any shape.

    Args:
        weight: ``[outs, ins]``, any floating type.
        bias: ``[outs]``, any floating type, or None.
        format: "float32" or "bfloat16"; other weights are rounded to it.

    Raises:
        ValueError: Another format.
    """
    if format not in _TYPES:
        raise ValueError(f"format is {format!r}, expected float32 or bfloat16")
    outs, ins = weight.shape
    # A bfloat16 line holds pairs of inputs, which move as one number of 4 bytes.
    words = _padded(weight.to(_TYPES[format]), BLOCK).view(torch.int32)
    return PackedMatrix(format, outs, ins, _panels(words), bias=_bias(bias))


def pack_blocks(blocks: Blocks, bias: Tensor | None = None) -> PackedMatrix:
    """Pack a quantised matrix; ``bias`` is ``[outs]`` of any floating type, or None.

    Scales and minima are stored as float16 if that changes none of them, else as float32.
    """
    outs, ins = blocks.shape
    words = _padded(blocks.values, BLOCK).view(torch.int32)
    if blocks.bits == 4:
        words = words[:, 0::2] | words[:, 1::2] << 4
    factors = [t for t in (blocks.scale, blocks.minimum) if t is not None]
    half = all(torch.equal(t.half().float(), t) for t in factors)
    packed = [_panels(_padded(t.half() if half else t, 1)) for t in factors]
    packed = [t.view(torch.float16 if half else torch.float32) for t in packed]
    return PackedMatrix(
        "int8" if blocks.bits == 8 else "int4",
        outs,
        ins,
        _panels(words),
        packed[0],
        packed[1] if len(packed) > 1 else None,
        _bias(bias),
        blocks.offset,
    )


def multiply(x: Tensor, packed: PackedMatrix) -> Tensor:
    """``x W^T + bias``.

    Args:
        x: float32 ``[rows, ins]`` on the CPU, dense.
        packed: The weights.

    Returns:
        float32 ``[rows, outs]``.

    Raises:
        ValueError: ``x`` has another shape or type.
    """
    if x.dtype is not torch.float32 or x.shape[1:] != (packed.ins,) or not x.is_contiguous():
        found = f"{x.dtype} {list(x.shape)}"
        raise ValueError(f"x is {found}, expected dense float32 [rows, {packed.ins}]")
    native = _native()
    if native is not None:
        return native.multiply(x, packed.matrix())
    weight = packed.unpacked
    if isinstance(weight, Blocks):
        return multiply_blocks(x, weight, packed.bias)
    return multiply_floats(x, weight, packed.bias)


@cache
def _native() -> NativeLinear | None:
    found = library()
    return None if found is None else NativeLinear(found)


def _padded(rows: Tensor, multiple: int) -> Tensor:
    """Zeros added: rows up to two panels, columns up to ``multiple``."""
    outs, ins = rows.shape
    if outs % _PADDED == ins % multiple == 0:
        return rows.contiguous()
    return torch.nn.functional.pad(rows, (0, -ins % multiple, 0, -outs % _PADDED))


def _panels(words: Tensor) -> Tensor:
    """``[outs, n]`` -> uint8, in the order ``[outs / 16][n][16]``."""
    outs, count = words.shape
    packed = allocate(words.numel() * words.element_size())
    panels = packed.view(words.dtype).view(outs // PANEL, count, PANEL)
    panels.copy_(words.view(-1, PANEL, count).transpose(1, 2))
    return packed


def _bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else allocate(4 * len(bias)).view(torch.float32).copy_(bias)
