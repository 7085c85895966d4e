"""A model's large weights in shared memory, so that processes on one machine share one copy.

Each process that loads a model packs its weights for oneDNN
(:class:`paceline.decoder.linear.Linear`) into memory of its own. Here the packed bytes are written
to a file in /dev/shm that processes of the same user map read-only.
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


def packed_path(fingerprint: str, weights: str) -> Path:
    """File of the packed weights of a model, if a process shares them.

    Args:
        fingerprint: Of the model (:func:`paceline.decoder.weights_fingerprint`).
        weights: Format of its weights (:class:`paceline.decoder.DecoderConfig`).
    """
    return SHM / f"{PREFIX}weights-{fingerprint[:32]}-{weights}"


class PackedWeights:
    """Weights that a process has published, mapped read-only.

    Safety contract: only the publisher writes, before the file gets its name. The file belongs to
    one user (mode 0600), whose processes are trusted with its content. It is locked (flock) while
    its publisher lives, and a starting verifier removes files of dead publishers; existing mappings
    stay valid. Packed tensors point into the mapping without a reference to it: keep this object
    alive as long as they are used.
    """

    def __init__(self, memory: mmap.mmap, header: Mapping[str, Any], begin: int) -> None:
        """See :meth:`open`."""
        with warnings.catch_warnings():
            # It is read-only on purpose: weights are never written.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self._data = torch.frombuffer(memory, dtype=torch.uint8)[begin:]
        self._entries = {entry["name"]: entry for entry in header["tensors"]}

    @classmethod
    def open(cls, path: Path) -> PackedWeights | None:
        """Map a file; None if it is missing, belongs to another user or a dead process, or was
        written by another torch or for another processor."""
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
        """A tensor over the mapping; packed, if the published one was.

        Raises:
            KeyError: There is no tensor of this name.
        """
        entry = self._entries[name]
        data = self._data[entry["offset"] : entry["offset"] + entry["bytes"]]
        dtype: torch.dtype = getattr(torch, entry["dtype"])
        if not entry["layout"]:
            return data.view(dtype).view(entry["shape"])
        return packed_over(data, entry["shape"], dtype, bytes.fromhex(entry["layout"]))


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


def publish(path: Path, tensors: Mapping[str, Tensor]) -> Publication | None:
    """Write tensors to a file for :meth:`PackedWeights.open`.

    Returns:
        None, with a warning in the log, if memory is short, another process shares them already,
        or this torch cannot map packed weights.
    """
    if not can_map():
        _log.warning("weights are not shared: this torch cannot map packed weights")
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
    """Header of the file, and the size of all tensors in bytes."""
    entries: list[dict[str, Any]] = []
    at = 0
    for name, tensor in tensors.items():
        size = memory_of(tensor)[1]
        entry = {"name": name, "offset": at, "bytes": size, "dtype": _name(tensor.dtype)}
        entries.append({**entry, "shape": list(tensor.shape), "layout": layout_of(tensor).hex()})
        at += _aligned(size)
    return json.dumps({"made_by": _made_by(), "tensors": entries}).encode(), at


def _made_by() -> str:
    """Build of torch and kind of processor, on which packed layouts depend."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {capability}, oneDNN limit {current_limit() or 'none'}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _page_end(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
