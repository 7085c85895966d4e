"""GGUF files: metadata and the places of tensors.

The reader of the ``gguf`` package does not check counts and lengths against the size of the file,
and takes seconds for a vocabulary. This one checks all of them, so a damaged file gives an error.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from paceline.decoder.errors import UnsupportedModelError

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


@dataclass(frozen=True)
class GgufTensor:
    """Place and type of a tensor.

    Attributes:
        name: Name in the file.
        shape: Its dimensions, outermost first.
        kind: How its values are stored.
        data: Bytes of the tensor, mapped from the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: Bytes


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file whose structure has been checked.

    Attributes:
        path: The file.
        metadata: Values by key; None for an array, whose values no caller needs.
        tensors: Tensors by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read metadata and places of tensors, and map the file.

    Raises:
        UnsupportedModelError: The file is damaged, or of a kind that is not supported.
        OSError: It cannot be read.
    """
    if not path.stat().st_size:
        raise UnsupportedModelError(f"{path} is empty, expected a GGUF file")
    reader = _Reader(path, np.memmap(path, np.uint8, "r"))
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
    metadata = {reader.text("a metadata key"): reader.value() for _ in range(values)}
    entries = [_entry(reader) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise reader.damaged(f"general.alignment is {alignment!r}, expected a power of two")
    begin = -(-reader.at // alignment) * alignment
    found = {entry.name: entry.place(reader, begin) for entry in entries}
    if len(found) < len(entries):
        raise reader.damaged("two tensors have one name")
    return GgufFile(path, metadata, found)


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
        """The error for a damaged file."""
        return UnsupportedModelError(f"{self.path}: {what}")

    def take(self, count: int) -> memoryview:
        """The next bytes."""
        start, self.at = self.at, self.at + count
        if self.at > len(self._view):
            raise self.damaged(f"the header ends at byte {len(self._view)}: the file is incomplete")
        return self._view[start : self.at]

    def number(self, format: str) -> Any:
        """The next number, by its ``struct`` format."""
        return struct.unpack(format, self.take(struct.calcsize(format)))[0]

    def text(self, what: str) -> str:
        """The next string."""
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

    def value(self) -> str | float | None:
        """The next metadata value; None for an array."""
        kind = self._kind()
        if kind == GGUFValueType.STRING:
            return self.text("a metadata value")
        if kind != GGUFValueType.ARRAY:
            scalar: float = self.number(_SCALARS[kind])
            return scalar
        kind, count = self._kind(), self.number("<Q")
        if kind == GGUFValueType.ARRAY:
            raise self.damaged("arrays of arrays are not supported")
        if kind != GGUFValueType.STRING:
            self.take(count * struct.calcsize(_SCALARS[kind]))
            return None
        self.expect_items(count, 8, "strings")
        for _ in range(count):
            self.take(int.from_bytes(self.take(8), "little"))
        return None

    def _kind(self) -> GGUFValueType:
        number = self.number("<I")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise self.damaged(f"a metadata value has type number {number}") from error
