"""GGUF files: metadata, the places of tensors, and tensors as torch's or as blocks.

The reader of the ``gguf`` package does not check counts and lengths against the size of the file,
and takes seconds for a vocabulary. This one checks all of them, so a damaged file gives an error.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import Q4_K, dequantize
from torch import Tensor

from paceline.convert.folder_files import part_paths
from paceline.decoder.config import UnsupportedModelError
from paceline.kernels.quantised import (
    QUANT_BLOCK,
    QuantisedMatrix,
    check_finite,
    concatenate,
    mxfp4,
    quantise,
)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}

Floats = np.ndarray[Any, np.dtype[np.float32]]
Parts = tuple[Bytes, Floats, Floats | None]
_CHUNK = 1 << 20  # weights decoded at a time, which bounds the temporaries
_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


@dataclass(frozen=True)
class GgufTensor:
    """Place and type of a tensor."""

    name: str  # name in the file
    shape: tuple[int, ...]  # its dimensions, outermost first
    kind: GGMLQuantizationType  # how its values are stored
    data: Bytes  # bytes of the tensor, mapped from the file

    def part(self, index: int, count: int) -> GgufTensor:
        """Return one of ``count`` equal parts of the outermost two dimensions together."""
        size = len(self.data) // count
        data = self.data[index * size : (index + 1) * size]
        shape = self.shape[0] * self.shape[1] // count, *self.shape[2:]
        return GgufTensor(f"{self.name}[{index}]", shape, self.kind, data)


@dataclass(frozen=True)
class GgufArray:
    """An array of the metadata, whose values are read on demand."""

    key: str  # name in the file
    kind: GGUFValueType  # type of its values
    count: int  # number of its values
    data: memoryview = field(repr=False)  # bytes of the values, mapped from the file

    def strings(self) -> list[str]:
        """Its values. Raises ``ValueError``: they are no strings, or one is not UTF-8."""
        if self.kind != GGUFValueType.STRING:
            raise ValueError(f"{self.key} is an array of {self.kind.name}, expected strings")
        texts, at = [], 0
        for index in range(self.count):
            start = at + 8
            at = start + int.from_bytes(self.data[at:start], "little")
            try:
                texts.append(str(self.data[start:at], "utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{self.key}[{index}] is not UTF-8: {error}") from error
        return texts

    @property
    def scalars(self) -> bool:
        """Whether its values are numbers."""
        return self.kind in _SCALARS

    def numbers(self) -> list[int] | list[float]:
        """Its values. Raises ``ValueError``: they are no numbers."""
        if not self.scalars:
            raise ValueError(f"{self.key} is an array of {self.kind.name}, expected numbers")
        numbers: list[int] | list[float] = np.frombuffer(self.data, _SCALARS[self.kind]).tolist()
        return numbers


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file, or the parts of one that was split, whose structure has been checked."""

    path: Path  # the file, or its first part
    metadata: Mapping[str, Any]  # values by key; a :class:`GgufArray` for an array
    tensors: Mapping[str, GgufTensor]  # tensors by name
    memory: Sequence[mmap.mmap] = ()  # the mapped files

    def release(self) -> None:
        """Give up the pages that were read; they are read again when they are needed."""
        for mapped in self.memory:
            mapped.madvise(mmap.MADV_DONTNEED)


def read_gguf(path: Path) -> GgufFile:
    """Read metadata and places of tensors of a file and of its other parts, and map them.

    Raises ``UnsupportedModelError`` if one is damaged, missing, or of a kind that is not supported,
    ``OSError`` if it cannot be read.
    """
    first = _read_part(path)
    count = first.metadata.get("split.count", 1) or 1
    paths = part_paths(path) if count != 1 else [path]
    if first.metadata.get("split.no", 0) or path != paths[0] or len(paths) != count:
        raise UnsupportedModelError(
            f"{path} is one of {count} parts of a model; give the first, NAME-00001-of-0000N.gguf, "
            "with the others beside it"
        )
    parts = [first]
    for number, part in enumerate(paths[1:], 1):
        if not part.is_file():
            raise UnsupportedModelError(f"{path} has {count} parts, and {part} does not exist")
        parts.append(_read_part(part))
        places = [parts[-1].metadata.get(f"split.{key}") for key in ("no", "count")]
        if places != [number, count]:
            raise UnsupportedModelError(
                f"{part} says that it is part {places[0]} of {places[1]}, from 0; expected "
                f"{number} of {count}"
            )
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    if len(tensors) < sum(len(part.tensors) for part in parts):
        raise UnsupportedModelError(f"{path}: two tensors of its parts have one name")
    memory = [mapped for part in parts for mapped in part.memory]
    return GgufFile(path, first.metadata, tensors, memory)


def _read_part(path: Path) -> GgufFile:
    if not path.stat().st_size:
        raise UnsupportedModelError(f"{path} is empty, expected a GGUF file")
    with path.open("rb") as opened:
        memory = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    reader = _Reader(path, np.frombuffer(memory, np.uint8))
    if reader.take(4).tobytes() != _MAGIC:
        raise UnsupportedModelError(f"{path} does not start with {_MAGIC!r}: it is no GGUF file")
    version = reader.number("<I")
    if version not in _VERSIONS:
        raise UnsupportedModelError(
            f"{path} has GGUF version {version}, expected 2 or 3 in little-endian order"
        )
    tensors, values = reader.number("<Q"), reader.number("<Q")
    reader.expect_items(tensors, 24, "tensors")
    reader.expect_items(values, 12, "metadata values")
    metadata = {key: reader.value(key) for key in reader.keys(values)}
    entries = [_entry(reader) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise reader.damaged(f"general.alignment is {alignment!r}, expected a power of two")
    begin = -(-reader.at // alignment) * alignment
    placed = {entry.name: entry.place(reader, begin) for entry in entries}
    if len(placed) < len(entries):
        raise reader.damaged("two tensors have one name")
    return GgufFile(path, metadata, placed, [memory])


@dataclass(frozen=True)
class _Entry:
    """A tensor's entry in the header; ``offset`` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int

    def place(self, reader: _Reader, begin: int) -> GgufTensor:
        values, size = GGML_QUANT_SIZES[self.kind]
        if self.shape[-1] % values:
            raise reader.damaged(
                f"tensor {self.name!r} of type {self.kind.name} has rows of {self.shape[-1]} "
                f"values, expected a multiple of {values}"
            )
        start = begin + self.offset
        stop = start + prod(self.shape) // values * size
        if stop > len(reader.data):
            raise reader.damaged(
                f"tensor {self.name!r} ends at byte {stop} of a file of {len(reader.data)} bytes: "
                "the file is incomplete or damaged"
            )
        return GgufTensor(self.name, self.shape, self.kind, reader.data[start:stop])


def _entry(reader: _Reader) -> _Entry:
    name = reader.text("a tensor's name")
    dimensions = reader.number("<I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise reader.damaged(f"tensor {name!r} has {dimensions} dimensions, expected 1 to 4")
    shape = tuple(reader.number("<Q") for _ in range(dimensions))
    number, offset = reader.number("<I"), reader.number("<Q")
    if 0 in shape:
        raise reader.damaged(f"tensor {name!r} has shape {shape[::-1]}")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{reader.path}: tensor {name!r} has type number {number}, which is unknown"
        ) from error
    return _Entry(name, shape[::-1], kind, offset)


class _Reader:
    """The header of a file, read from its start."""

    def __init__(self, path: Path, data: Bytes) -> None:
        self.path, self.data, self.at = path, data, 0
        self._view = memoryview(data.data)  # cut and read much faster than an array

    def damaged(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.path}: {what}")

    def take(self, count: int) -> memoryview:
        """Return the next bytes."""
        start, self.at = self.at, self.at + count
        if self.at > len(self._view):
            raise self.damaged(f"the header ends at byte {len(self._view)}: the file is incomplete")
        return self._view[start : self.at]

    def number(self, format: str) -> Any:
        """Return the next number, by its ``struct`` format."""
        return struct.unpack(format, self.take(struct.calcsize(format)))[0]

    def text(self, what: str) -> str:
        try:
            return self.take(self.number("<Q")).tobytes().decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is not UTF-8: {error}") from error

    def expect_items(self, count: int, size: int, what: str) -> None:
        """Refuse a count whose items, of at least ``size`` bytes each, do not fit in the file."""
        if count * size > len(self._view) - self.at:
            raise self.damaged(
                f"{count} {what} do not fit in {len(self._view)} bytes: the file is incomplete or "
                "damaged"
            )

    def keys(self, count: int) -> Iterator[str]:
        """Yield each next metadata key, of so many; its value is to be read before the next one."""
        for _ in range(count):
            yield self.text("a metadata key")

    def value(self, key: str) -> str | float | GgufArray:
        """Return the next metadata value, which belongs to a key."""
        kind = self._kind()
        if kind == GGUFValueType.STRING:
            return self.text("a metadata value")
        if kind != GGUFValueType.ARRAY:
            scalar: float = self.number(_SCALARS[kind])
            return scalar
        kind, count = self._kind(), self.number("<Q")
        if kind == GGUFValueType.ARRAY:
            raise self.damaged("arrays of arrays are not supported")
        start = self.at
        if kind != GGUFValueType.STRING:
            self.take(count * struct.calcsize(_SCALARS[kind]))
        else:
            self.expect_items(count, 8, "strings")
            for _ in range(count):
                self.take(int.from_bytes(self.take(8), "little"))
        return GgufArray(key, kind, count, self._view[start : self.at])

    def _kind(self) -> GGUFValueType:
        number = self.number("<I")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise self.damaged(f"a metadata value has type number {number}") from error


def decode(file: GgufFile, tensor: GgufTensor, *, small: bool = False) -> Tensor | QuantisedMatrix:
    """Return the values of a tensor: a matrix of a supported format as it is, others converted.

    F32, F16 and BF16 become tensors of that type. A matrix of Q8_0, Q4_0, Q4_1, Q4_K or MXFP4
    becomes blocks with exactly its values, any other format 8-bit blocks, or, if they are to be
    ``small``, blocks of :func:`converted_bits`. A vector becomes float32.
    Raises ``UnsupportedModelError`` if the ``gguf`` package cannot decode the format, or a scale is
    not finite.
    """
    if tensor.kind in _FLOATS:
        flat = torch.frombuffer(bytearray(tensor.data), dtype=_FLOATS[tensor.kind])
        return flat.view(tensor.shape)
    check_format(file, tensor)
    if len(tensor.shape) != 2:
        values = dequantize(_rows(tensor), tensor.kind).reshape(tensor.shape)
        return torch.from_numpy(values)
    rows = _rows(tensor)
    step = max(1, _CHUNK // tensor.shape[1])
    starts = range(0, len(rows), step)
    try:
        with np.errstate(all="ignore"):
            bits = (converted_bits(tensor.kind) if small else 0) or 8
            matrix = concatenate([_blocks(rows[i : i + step], tensor.kind, bits) for i in starts])
        check_finite(matrix.scale, matrix.minimum)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{file.path}: tensor {tensor.name!r} is damaged: {error}"
        ) from error
    return matrix


def converted_bits(kind: GGMLQuantizationType) -> Literal[0, 4, 8]:
    """Return the bits of the small blocks of other values that a matrix of this format becomes;
    0: it keeps its values. Formats of fewer than 4 bits a weight become 4: their own error is 3 to
    6 times what that adds, while IQ4_NL's is only as large."""
    if kind in _FLOATS or kind in _EXACT:
        return 0
    values, size = GGML_QUANT_SIZES[kind]
    return 4 if 8 * size < 4 * values else 8


def check_format(file: GgufFile, tensor: GgufTensor) -> None:
    """Raise ``UnsupportedModelError`` for a format that the ``gguf`` package cannot decode."""
    if tensor.kind in _FLOATS or tensor.kind in _EXACT:
        return
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.kind][1]), np.uint8), tensor.kind)
    except NotImplementedError as error:
        exact = ", ".join(kind.name for kind in (*_FLOATS, *_EXACT))
        raise UnsupportedModelError(
            f"{file.path}: tensor {tensor.name!r} has the format {tensor.kind.name}, which is not "
            f"supported; expected {exact}, or one that the gguf package decodes, such as Q6_K"
        ) from error


def _rows(tensor: GgufTensor) -> Bytes:
    """Return the bytes of a tensor, a row of the matrix each."""
    return tensor.data.reshape(-1, len(tensor.data) // int(np.prod(tensor.shape[:-1])))


def _blocks(rows: Bytes, kind: GGMLQuantizationType, converted: int) -> QuantisedMatrix:
    """Return a matrix's rows as blocks, from bytes; of ``converted`` bits if of other values."""
    if kind not in _EXACT:
        return quantise(torch.from_numpy(dequantize(rows, kind)), converted)
    split, bits, offset = _EXACT[kind]
    outs = len(rows)
    values, scale, minimum = split(rows.reshape(-1, GGML_QUANT_SIZES[kind][1]))
    ins = values.size // outs
    return QuantisedMatrix(
        torch.from_numpy(values.reshape(outs, ins)),
        torch.from_numpy(scale.reshape(outs, ins // QUANT_BLOCK)),
        None if minimum is None else torch.from_numpy(minimum.reshape(outs, ins // QUANT_BLOCK)),
        bits,
        offset,
    )


def _halves(raw: Bytes) -> Floats:
    """float16 numbers ``[n, 2 * m]`` in bytes, as float32 ``[n, m]``."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """Bytes ``[..., n]`` to ``[..., 2 * n]``: all low halves, then all high halves."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _split_q8_0(raw: Bytes) -> Parts:
    return raw[:, 2:] ^ np.uint8(128), _halves(raw[:, :2]), None


def _split_q4_0(raw: Bytes) -> Parts:
    return _nibbles(raw[:, 2:]), _halves(raw[:, :2]), None


def _split_q4_1(raw: Bytes) -> Parts:
    return _nibbles(raw[:, 4:]), _halves(raw[:, :2]), _halves(raw[:, 2:4])


def _split_q4_k(raw: Bytes) -> Parts:
    """256 weights: 8 blocks with 6-bit scales and minima, times a float16 each for all."""
    scale, minimum = Q4_K.get_scale_min(raw[:, 4:16])
    d, lowest = _halves(raw[:, :2]), _halves(raw[:, 2:4])
    scales, minima = d * scale.astype(np.float32), -(lowest * minimum.astype(np.float32))
    return _nibbles(raw[:, 16:].reshape(-1, 4, QUANT_BLOCK)), scales, minima


def _split_mxfp4(raw: Bytes) -> Parts:
    exponents = np.ascontiguousarray(raw[:, :1])
    matrix = mxfp4(torch.from_numpy(_nibbles(raw[:, 1:])), torch.from_numpy(exponents))
    return matrix.values.numpy(), matrix.scale.numpy(), None


# Formats that are blocks as they are: how to split their bytes, bits, and offset.
_EXACT: dict[GGMLQuantizationType, tuple[Callable[[Bytes], Parts], Literal[8, 4], int]] = {
    GGMLQuantizationType.Q8_0: (_split_q8_0, 8, 128),
    GGMLQuantizationType.Q4_0: (_split_q4_0, 4, 8),
    GGMLQuantizationType.Q4_1: (_split_q4_1, 4, 0),
    GGMLQuantizationType.Q4_K: (_split_q4_k, 4, 0),
    GGMLQuantizationType.MXFP4: (_split_mxfp4, 8, 128),
}
