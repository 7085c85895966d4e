"""A model's large weights in shared memory, so that processes on one machine keep them once.

Weights that oneDNN has packed (:class:`paceline.decoder.linear.Linear`) lie in no file of the
model, and each process that loads it has its own copy. Here their bytes are written to a file in
/dev/shm that processes of the same user map read-only.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.decoder.blobs import can_map, layout_of, memory_of, packed_over
from paceline.decoder.onednn import current_limit
from paceline.kv.segment import PREFIX, SHM, claim, is_orphan

_log = logging.getLogger(__name__)

_ALIGNMENT = 64
_LENGTH_BYTES = 8


def packed_path(fingerprint: str, dtype: torch.dtype) -> Path:
    """Where the packed weights of a model lie, if somebody shares them.

    Args:
        fingerprint: Of the model (:func:`paceline.decoder.weights_fingerprint`).
        dtype: Of its weights.
    """
    return SHM / f"{PREFIX}weights-{fingerprint[:32]}-{_name(dtype)}"


class PackedWeights:
    """Weights that a process has published, mapped read-only.

    Safety contract: the publisher alone writes, and only before the file has its name. The file is
    of one user (mode 0600), whose other processes are believed: what is in it decides what a model
    says. It is locked (flock) while its publisher lives, and a starting verifier removes
    those of dead ones; pages stay with who has mapped them. Packed tensors point into the mapping
    without keeping it: keep this object as long as them.
    """

    def __init__(self, memory: mmap.mmap, header: Mapping[str, Any], begin: int) -> None:
        """See :meth:`open`."""
        with warnings.catch_warnings():
            # That it is read-only is what we want: weights are never written.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self._data = torch.frombuffer(memory, dtype=torch.uint8)[begin:]
        self._entries = {entry["name"]: entry for entry in header["tensors"]}

    @classmethod
    def open(cls, path: Path) -> PackedWeights | None:
        """Map a file; None if it is not there, of another user or a dead process, or made by
        another torch or for another processor."""
        if not can_map():
            return None
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if os.fstat(file).st_uid != os.geteuid() or is_orphan(file):
                return None
            memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        stop = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES], "little")
        header = json.loads(memory[_LENGTH_BYTES:stop])
        return cls(memory, header, _page_end(stop)) if header["made_by"] == _made_by() else None

    def tensor(self, name: str) -> Tensor:
        """A tensor that lies in the mapping; packed, if the published one was.

        Raises:
            KeyError: There is none of this name.
        """
        entry = self._entries[name]
        data = self._data[entry["offset"] : entry["offset"] + entry["bytes"]]
        dtype: torch.dtype = getattr(torch, entry["dtype"])
        if not entry["layout"]:
            return data.view(dtype).view(entry["shape"])
        return packed_over(data, entry["shape"], dtype, bytes.fromhex(entry["layout"]))


class Publication:
    """Weights that this process shares; kept as long as they are to be found."""

    def __init__(self, path: Path, file: int) -> None:
        """See :func:`publish`."""
        self.path = path
        self._file = file

    def close(self) -> None:
        """Take the file away; mappings of it stay. Closing twice is safe."""
        if self._file >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


def publish(path: Path, tensors: Mapping[str, Tensor]) -> Publication | None:
    """Write tensors where :meth:`PackedWeights.open` finds them.

    Returns:
        None, with a warning in the log, if there is no room, somebody shares them already, or
        this torch can map no packed weights.
    """
    if not can_map():
        _log.warning("weights are not shared: this torch can map no packed ones")
        return None
    header, size = _header(tensors)
    begin = _page_end(_LENGTH_BYTES + len(header))
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        claim(file)
        os.posix_fallocate(file, 0, begin + size)
        os.pwrite(file, len(header).to_bytes(_LENGTH_BYTES, "little") + header, 0)
        at = begin
        for tensor in tensors.values():
            address, count = memory_of(tensor)
            os.pwrite(file, (ctypes.c_char * count).from_address(address), at)
            at += _aligned(count)
        os.link(draft, path)
    except OSError as error:
        os.close(file)
        _log.warning("weights are not shared: %s", error)
        return None
    finally:
        draft.unlink(missing_ok=True)
    return Publication(path, file)


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """What the file begins with, and the bytes of all tensors."""
    entries: list[dict[str, Any]] = []
    at = 0
    for name, tensor in tensors.items():
        size = memory_of(tensor)[1]
        place = {"name": name, "offset": at, "bytes": size, "dtype": _name(tensor.dtype)}
        entries.append({**place, "shape": list(tensor.shape), "layout": layout_of(tensor).hex()})
        at += _aligned(size)
    return json.dumps({"made_by": _made_by(), "tensors": entries}).encode(), at


def _made_by() -> str:
    """Packed layouts are those of a build of torch on a kind of processor."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {capability}, oneDNN limit {current_limit() or 'none'}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _page_end(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
