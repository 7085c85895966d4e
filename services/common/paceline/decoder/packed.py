"""A packed model: its weights in one file, as the kernels read them.

The file holds the tensors one after the other, then a header in JSON, its SHA-256 and its length.
Where the disk is full it is a memfd: memory without a name. The descriptor can be passed to other
processes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import dropwhile, islice
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.kernels.linear import ALIGNMENT, PackedMatrix, allocate
from paceline.kernels.rotated import RotatedMatrix

Part = Tensor | PackedMatrix | RotatedMatrix
NAME = "paceline-weights"  # of a memfd in /proc/PID/fd
LAYOUT = "packed 7"  # of the file, and of the bytes of a matrix
_LENGTH_BYTES = 8
_DIGEST_BYTES = 32
_MADV_POPULATE_READ = 22  # of Linux 5.14
_MATRIX_FIELDS = ("format", "outs", "ins", "offset", "minima", "scales_f16", "rotation")
_OUTER = "outer"
_PIECE = 32 << 20  # bytes that a thread reads at once
_READERS = 4
_MAX_HEADER = 1 << 28


class Parts(Protocol):
    """The parts of a model, by which :class:`paceline.decoder.Decoder` builds it."""

    def outer(self) -> Mapping[str, Part]:
        """Return the parts beside the layers."""

    def layer(self, index: int) -> Mapping[str, Part]:
        """Return the parts of a layer, 0 for the first."""


class PackedWriter:
    """Writes the parts of a model into a file, a layer's at a time, from any thread."""

    def __init__(self, file: int) -> None:
        """Take an empty file; the caller closes it."""
        self._file, self._size, self._lock = file, 0, Lock()
        self._groups: dict[str, Any] = {}

    def add_outer(self, parts: Mapping[str, Part]) -> None:
        """Write the parts beside the layers. Raises ``OSError``, as the others do, if there is no
        room."""
        self._add(_OUTER, parts)

    def add_layer(self, index: int, parts: Mapping[str, Part]) -> None:
        self._add(str(index), parts)

    def finish(self) -> None:
        """Write the header behind all parts."""
        header = json.dumps({"layout": LAYOUT, "groups": self._groups}).encode()
        end = hashlib.sha256(header).digest() + len(header).to_bytes(_LENGTH_BYTES, "little")
        _write(self._file, memoryview(header + end), self._size)

    def _add(self, group: str, parts: Mapping[str, Part]) -> None:
        entries = {}
        for name, part in parts.items():
            assert isinstance(part, Tensor | PackedMatrix), "rotated matrices stay on their GPU"
            packed = isinstance(part, PackedMatrix)
            named = part.tensors() if isinstance(part, PackedMatrix) else {"tensor": part}
            entries[name] = {
                "matrix": {name: getattr(part, name) for name in _MATRIX_FIELDS} if packed else {},
                "tensors": {name: self._put(tensor) for name, tensor in named.items()},
            }
        with self._lock:
            self._groups[group] = entries

    def _put(self, tensor: Tensor) -> dict[str, Any]:
        tensor = tensor.contiguous()
        with self._lock:
            offset, self._size = self._size, self._size + _aligned(tensor.nbytes)
        if tensor.nbytes:
            data = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
            _write(self._file, memoryview(data), offset)
        kind = str(tensor.dtype).removeprefix("torch.")
        return {"offset": offset, "dtype": kind, "shape": list(tensor.shape)}


class PackedWeights:
    """The parts of a model in a file that :class:`PackedWriter` has written.

    The file is mapped, so that all who do so share one copy. Nobody writes to it, since entries of
    the cache folder are made elsewhere and renamed; a mapping outlives its name.
    """

    mapped_bytes = 0  # of a file's cache, which the system counts as memory that is free

    def __init__(self, file: int, *, share: bool = False, whole: bool = True) -> None:
        """Map a file, which the caller may close. Unless ``share``, it is copied where the system
        has no huge pages for it, since a step that reads all weights is about 10% slower then.
        Unless ``whole``, parts are read when they are used.
        Raises ``OSError`` or ``ValueError`` if it cannot be mapped, is damaged, or has another
        layout."""
        header, size = read_header(file)
        self._groups = header["groups"]
        memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_READ)[: 1 + whole]:
            with suppress(OSError):  # a system without it
                memory.madvise(advice)
        with warnings.catch_warnings():
            # It is read-only on purpose: weights are never written.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self._data = torch.frombuffer(memory, dtype=torch.uint8)[:size]
        if share or _huge_bytes(self._data.data_ptr()) >= size / 2:
            self.mapped_bytes = size
        else:
            self._data = _copy(file, size)

    def outer(self) -> dict[str, Part]:
        return self._parts(_OUTER)

    def layer(self, index: int) -> dict[str, Part]:
        return self._parts(str(index))

    def _parts(self, group: str) -> dict[str, Part]:
        return {name: self._part(**entry) for name, entry in self._groups[group].items()}

    def _part(self, matrix: Mapping[str, Any], tensors: Mapping[str, Any]) -> Part:
        loaded: Any = {name: self._tensor(**place) for name, place in tensors.items()}
        part: Part = PackedMatrix(**matrix, **loaded) if matrix else loaded["tensor"]
        return part

    def _tensor(self, offset: int, dtype: str, shape: list[int]) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        return self._data[offset : offset + size].view(kind).view(shape)


def new_memory() -> int:
    """Return an empty memfd for :class:`PackedWriter`; the caller closes it."""
    return os.memfd_create(NAME, os.MFD_CLOEXEC)


def read_header(file: int) -> tuple[dict[str, Any], int]:
    """Return the header and the number of bytes before it. Raises ``ValueError`` if the file is
    damaged or has another layout."""
    size = os.fstat(file).st_size
    end = os.pread(
        file, _DIGEST_BYTES + _LENGTH_BYTES, max(0, size - _DIGEST_BYTES - _LENGTH_BYTES)
    )
    length = int.from_bytes(end[_DIGEST_BYTES:], "little")
    begin = size - len(end) - length
    if not 0 < length <= _MAX_HEADER or begin < 0:
        raise ValueError("the packed weights are cut off")
    encoded = os.pread(file, length, begin)
    if hashlib.sha256(encoded).digest() != end[:_DIGEST_BYTES]:
        raise ValueError("the header of the packed weights is damaged")
    header: dict[str, Any] = json.loads(encoded)
    if header["layout"] != LAYOUT:
        raise ValueError(
            f"the packed weights have the layout {header['layout']!r}, expected {LAYOUT!r}: "
            "both processes need the same version"
        )
    return header, begin


def _huge_bytes(address: int) -> int:
    """Return the bytes of the mapping at an address that are in huge pages."""
    begin = f"{address:x}-"
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
        lines = dropwhile(lambda line: not line.startswith(begin), file)
        kinds = ("FilePmdMapped:", "ShmemPmdMapped:")
        sizes = [int(line.split()[1]) for line in islice(lines, 30) if line.startswith(kinds)]
    return sum(sizes[: len(kinds)]) << 10


def _copy(file: int, size: int) -> Tensor:
    """Return the first bytes of a file in memory of this process, read by several threads: a first
    touch takes longer than the copy."""
    data = allocate(size)
    numbers: Any = data.numpy()
    view = memoryview(numbers)

    def read(at: int) -> None:
        left, place = view[at : at + _PIECE], at
        while left:
            if not (count := os.preadv(file, [left], place)):
                raise ValueError("the packed weights are cut off")
            left, place = left[count:], place + count

    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(read, range(0, size, _PIECE)))
    return data


def _write(file: int, left: memoryview, offset: int) -> None:
    while left:  # one call writes 2 GiB at most
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
