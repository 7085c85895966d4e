"""A model's large weights in shared memory, so that processes on one machine share one copy.

Each process that loads a model packs its weights (:class:`paceline.decoder.weights.Linear`) into
memory of its own. Here the packed bytes are written to a sealed memfd: memory without a name, whose
descriptor is passed to other processes, and which the kernel frees with its last mapping.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.linear import PackedMatrix

_ALIGNMENT = 64
_LENGTH_BYTES = 8
_LAYOUT = "packed 6"
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MATRIX_FIELDS = ("format", "outs", "ins", "offset", "minima", "scales_f16", "rotation")


NAME = "paceline-weights"
"""Name of the memory in /proc/PID/fd."""


class PackedWeights:
    """Weights that a process has published, mapped read-only.

    Safety contract: the memory is sealed, so nobody changes or shrinks it; its content is trusted.
    A mapping stays valid as long as a tensor over it.
    """

    def __init__(self, file: int) -> None:
        """Map what :func:`publish` returned, in this process or another; the caller closes it.
        Raises ``OSError``: it is no memfd, or cannot be mapped. Raises ``ValueError``: it is not
        sealed, or was written in another layout."""
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("the packed weights are not sealed")
        memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        stop = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES], "little")
        header = json.loads(memory[_LENGTH_BYTES:stop])
        if header["layout"] != _LAYOUT:
            raise ValueError(
                f"the packed weights have the layout {header['layout']!r}, expected {_LAYOUT!r}: "
                "both processes need the same version, and compiled kernels or none"
            )
        with warnings.catch_warnings():
            # It is read-only on purpose: weights are never written.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self._data = torch.frombuffer(memory, dtype=torch.uint8)[_page_end(stop) :]
        self._entries = header["weights"]

    def get(self, name: str) -> Tensor | PackedMatrix:
        """A weight over the mapping, as it was published. Raises ``KeyError``: there is no weight
        of this name."""
        entry = self._entries[name]
        tensors: dict[str, Any] = {p["name"]: self._tensor(p) for p in entry["tensors"]}
        if not entry["matrix"]:
            tensor: Tensor = tensors["tensor"]
            return tensor
        return PackedMatrix(**entry["matrix"], **tensors)

    def _tensor(self, part: Mapping[str, Any]) -> Tensor:
        data = self._data[part["offset"] : part["offset"] + part["bytes"]]
        dtype: torch.dtype = getattr(torch, part["dtype"])
        return data.view(dtype).view(part["shape"])


def publish(weights: Mapping[str, Tensor | PackedMatrix]) -> int:
    """Write dense tensors and packed matrices, by name, for :class:`PackedWeights`. Returns a
    descriptor, which the caller closes; mappings stay valid. Raises ``OSError``: memory is short.
    """
    entries, tensors, size = _entries(weights)
    header = json.dumps({"layout": _LAYOUT, "weights": entries}).encode()
    begin = _page_end(_LENGTH_BYTES + len(header))
    file = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(file, 0, begin + size)
        os.pwrite(file, len(header).to_bytes(_LENGTH_BYTES, "little") + header, 0)
        for offset, tensor in tensors:
            data = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
            _write(file, data, begin + offset)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(file)
        raise
    return file


def _write(file: int, data: ctypes.Array[ctypes.c_char], offset: int) -> None:
    left = memoryview(data)
    while left:  # one call writes 2 GiB at most
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


def _entries(
    weights: Mapping[str, Tensor | PackedMatrix],
) -> tuple[dict[str, Any], list[tuple[int, Tensor]], int]:
    """Header entries by name, all tensors with their offsets, and the size of all in bytes."""
    entries: dict[str, Any] = {}
    tensors: list[tuple[int, Tensor]] = []
    at = 0
    for name, weight in weights.items():
        packed = isinstance(weight, PackedMatrix)
        named = weight.tensors() if isinstance(weight, PackedMatrix) else {"tensor": weight}
        parts = []
        for part, tensor in named.items():
            size, kind = tensor.nbytes, _name(tensor.dtype)
            parts.append(
                {"name": part, "offset": at, "bytes": size, "dtype": kind}
                | {"shape": list(tensor.shape)}
            )
            tensors.append((at, tensor))
            at += _aligned(size)
        fields = {name: getattr(weight, name) for name in _MATRIX_FIELDS} if packed else {}
        entries[name] = {"matrix": fields, "tensors": parts}
    return entries, tensors, at


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _page_end(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
