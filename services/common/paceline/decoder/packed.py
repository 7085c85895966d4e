"""A model's large weights in shared memory, so that processes on one machine share one copy.

Each process that loads a model packs its weights (:class:`paceline.decoder.weights.Linear`) into
memory of its own. Here the packed bytes are written to a file in /dev/shm that processes of the
same user map read-only.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import mmap
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.kernels import cpu_kernels
from paceline.kernels.linear import PackedMatrix

_log = logging.getLogger(__name__)

_ALIGNMENT = 64
_LENGTH_BYTES = 8
_FORMAT = 4
_MATRIX_FIELDS = ("format", "outs", "ins", "offset", "minima", "scales_f16")


def packed_path(fingerprint: str, weights: str) -> Path:
    """File of the packed weights of a model, if a process shares them.

    Args:
        fingerprint: Of the model (:func:`paceline.decoder.weights_fingerprint`).
        weights: Format of its weights (:class:`paceline.decoder.DecoderConfig`).
    """
    return Path(f"/dev/shm/paceline-weights-{fingerprint[:32]}-{weights}")


class PackedWeights:
    """Weights that a process has published, mapped read-only.

    Safety contract: only the publisher writes, before the file gets its name. The file belongs to
    one user (mode 0600), whose processes are trusted with its content. It is locked (flock) while
    its publisher lives; the next publisher replaces the file of a dead one. A mapping stays
    valid as long as a tensor over it.
    """

    def __init__(self, memory: mmap.mmap, header: Mapping[str, Any], begin: int) -> None:
        """See :meth:`open`."""
        with warnings.catch_warnings():
            # It is read-only on purpose: weights are never written.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self._data = torch.frombuffer(memory, dtype=torch.uint8)[begin:]
        self._entries = header["weights"]

    @classmethod
    def open(cls, path: Path) -> PackedWeights | None:
        """Map a file; None if it is missing, belongs to another user or a dead process, or was
        written in another layout."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if os.fstat(file).st_uid != os.geteuid() or not _is_locked(file):
                return None
            memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        stop = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES], "little")
        header = json.loads(memory[_LENGTH_BYTES:stop])
        return cls(memory, header, _page_end(stop)) if header["layout"] == _layout() else None

    def get(self, name: str) -> Tensor | PackedMatrix:
        """A weight over the mapping, as it was published.

        Raises:
            KeyError: There is no weight of this name.
        """
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


class Publication:
    """Weights that this process shares, until closed."""

    def __init__(self, path: Path, file: int) -> None:
        """See :func:`publish`."""
        self.path = path
        self._file = file

    def close(self) -> None:
        """Remove the file; existing mappings stay valid. Closing twice is safe."""
        if self._file >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


def publish(path: Path, weights: Mapping[str, Tensor | PackedMatrix]) -> Publication | None:
    """Write weights to a file for :meth:`PackedWeights.open`.

    Args:
        path: See :func:`packed_path`.
        weights: Dense tensors and packed matrices by name.

    Returns:
        None, with a warning in the log, if memory is short or another process shares them already.
    """
    entries, tensors, size = _entries(weights)
    header = json.dumps({"layout": _layout(), "weights": entries}).encode()
    begin = _page_end(_LENGTH_BYTES + len(header))
    _remove_dead(path)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.posix_fallocate(file, 0, begin + size)
        os.pwrite(file, len(header).to_bytes(_LENGTH_BYTES, "little") + header, 0)
        for offset, tensor in tensors:
            data = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
            os.pwrite(file, data, begin + offset)
        os.link(draft, path)
    except OSError as error:
        os.close(file)
        _log.warning("weights are not shared: %s", error)
        return None
    finally:
        draft.unlink(missing_ok=True)
    return Publication(path, file)


def _remove_dead(path: Path) -> None:
    """Remove the file of a publisher that was killed."""
    with suppress(OSError):  # there is none, or it is another user's
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not _is_locked(file):
                path.unlink()
        finally:
            os.close(file)


def _is_locked(file: int) -> bool:
    """Whether the publisher of a file lives: the kernel drops its lock however it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


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


def _layout() -> str:
    """What the bytes of a matrix mean; different without compiled kernels."""
    return f"plain {_FORMAT}" if cpu_kernels().library is None else f"packed {_FORMAT}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _page_end(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
