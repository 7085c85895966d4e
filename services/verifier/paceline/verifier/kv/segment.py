"""One sequence's KV in one POSIX shared-memory object."""

from __future__ import annotations

import errno
import logging
import math
import mmap
import os
import secrets
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from paceline.shm import HEADER_BYTES, PREFIX, SHM, SegmentHeader, claim, is_orphan
from paceline.verifier.kv.layout import KvLayout, round_up
from paceline.verifier.kv.taps import TapLayout, TapPlanes

_log = logging.getLogger(__name__)


class OutOfMemory(Exception):
    """The machine has no shared memory left for a reservation."""


class Segment:
    """KV memory of one sequence: a sparse shared-memory file, mapped once, reserved step by step.

    The file begins with a :class:`paceline.shm.SegmentHeader`; the planes follow (KvLayout), and
    those of the hidden states, if any are kept (TapLayout).

    Safety contract:

    - Only the engine thread writes, and only below ``reserved``: nothing may touch a slot before
      ``reserve()`` has given it memory. Writing beyond would end the process by SIGBUS.
    - Only the engine thread frees (``close()``), between two steps, so that no forward pass ever
      runs over memory that goes away.
    - Other processes of the same user (mode 0600) may map the file read-only and read positions
      below the header's committed length, which only grows; positions at or above it change at any
      time, and those beyond ``reserved`` have no memory. A mapping taken before ``close()`` stays
      valid memory afterwards, never written again: the header's generation tells its reader.
    - No reader can keep a segment from being closed: its pages go with the last mapping of them.
    - The file is locked (flock) as long as its owner lives: who gets the lock may remove it.

    Attributes:
        name: Name below /dev/shm: ``paceline-<pid>-<process start in ticks>-<random>``.
        kv: ``[layers, 2, kv_heads, capacity, head_dim]`` over the mapping; 0 is keys, 1 values.
        capacity: Slots. Unit: tokens.
        reserved: Slots that have memory. Unit: tokens.
        taps: Hidden states that are kept; None: none.
        header: What readers in other processes see; of no use once closed.
    """

    def __init__(self, layout: KvLayout, capacity: int, taps: TapLayout | None = None) -> None:
        """Make a segment; it has an address range but no memory yet, but for its header's.

        Args:
            layout: Shape of the model's KV.
            capacity: Slots, a multiple of 256.
            taps: Where hidden states are to lie; None: none are kept.

        Raises:
            OutOfMemory: /dev/shm takes no more files or cannot map one.
        """
        self.layout = layout
        self.capacity = capacity
        self.reserved = 0
        self._taps_offset = layout.byte_size(capacity)
        self.byte_size = self._taps_offset + (0 if taps is None else taps.byte_size)
        self.name = f"{own_prefix()}{secrets.token_hex(8)}"
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise OutOfMemory(f"cannot make {self.path}: {error.strerror}") from error
        try:
            claim(self._file)
            os.ftruncate(self._file, self.byte_size)
            os.posix_fallocate(self._file, 0, HEADER_BYTES)
            mapping = mmap.mmap(self._file, self.byte_size)
        except (OSError, ValueError) as error:
            os.unlink(self.path)
            os.close(self._file)
            raise OutOfMemory(
                f"cannot map {self.byte_size} bytes of {self.path}: {error}"
            ) from error
        shape = (layout.layers, 2, layout.kv_heads, capacity, layout.head_dim)
        self.header = SegmentHeader(mapping)
        memory = torch.frombuffer(mapping, dtype=layout.dtype, offset=HEADER_BYTES)
        self.kv: Tensor = memory[: math.prod(shape)].view(shape)
        self.taps = None if taps is None else TapPlanes(taps, memory[math.prod(shape) :])
        self._layers = [(layer[0], layer[1]) for layer in self.kv]

    @property
    def path(self) -> Path:
        """The file."""
        return SHM / self.name

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""
        return self._file < 0

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each ``[kv_heads, capacity, head_dim]``."""
        return self._layers[index]

    def taps_offset(self, layer: int) -> int:
        """Where the hidden states of a kept layer begin. Unit: bytes from the file's start."""
        assert self.taps is not None, "hidden states are kept"
        layout = self.taps.layout
        return self._taps_offset + layout.taps.layers.index(layer) * layout.plane_bytes

    def reserve(self, tokens: int) -> None:
        """Give memory to the first ``tokens`` slots, rounded up to steps of 256.

        Raises:
            OutOfMemory: /dev/shm is full. What was reserved before stays.
        """
        if tokens <= self.reserved:
            return
        target = min(round_up(tokens), self.capacity)
        row = self.layout.row_bytes
        try:
            for plane in range(self.layout.planes):
                start = self.layout.offset(plane, self.capacity) + self.reserved * row
                os.posix_fallocate(self._file, start, (target - self.reserved) * row)
            self._reserve_taps(target)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise OutOfMemory(
                f"/dev/shm has no room for {target - self.reserved} more tokens of KV; "
                "wait for other sequences to end, or give the machine more shared memory"
            ) from error
        self.reserved = target

    def copy_prefix(self, source: Segment, tokens: int) -> None:
        """Copy the first ``tokens`` positions of another cache of the same layout.

        Raises:
            OutOfMemory: /dev/shm is full.
        """
        self.reserve(tokens)
        self.kv[..., :tokens, :].copy_(source.kv[..., :tokens, :])
        if tokens and self.taps is not None and source.taps is not None:
            self.taps.copy_prefix(source.taps, tokens)

    def keep(self, slots: list[int], start: int) -> None:
        """Move the KV at ``slots`` (each at or after its goal) to ``start``, ``start + 1``, ..."""
        moved = self.kv.index_select(3, torch.tensor(slots))
        self.kv[..., start : start + len(slots), :] = moved

    def publish(self, committed: int) -> None:
        """Tell readers how many positions are final; their KV must be written. Unit: tokens."""
        if not self.closed:
            self.header.commit(committed)

    def close(self) -> None:
        """Unlink the file and let go of the memory. Closing twice is safe.

        The tensors alone keep the mapping, so the last view of them takes it along: a view that
        someone still holds never points into nothing.
        """
        if self.closed:
            return
        self.header.close()
        self.header.release()
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self._file)
        self._file = -1
        self.reserved = 0
        self._layers = []
        self.kv = torch.empty(0)
        self.taps = None

    def _reserve_taps(self, tokens: int) -> None:
        if self.taps is None:
            return
        layout = self.taps.layout
        done, goal = min(self.reserved, layout.slots), min(tokens, layout.slots)
        for plane in range(len(layout.taps.layers) if done < goal else 0):
            start = self._taps_offset + plane * layout.plane_bytes + done * layout.row_bytes
            os.posix_fallocate(self._file, start, (goal - done) * layout.row_bytes)


@lru_cache(maxsize=1)
def own_prefix() -> str:
    """What the names of all segments of this process begin with."""
    # The 22nd field of stat, counted after the parenthesised name, which may hold spaces.
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return f"{PREFIX}{os.getpid()}-{ticks}-"


def own_segments() -> set[str]:
    """Names of all segments of this process below /dev/shm."""
    return {path.name for path in SHM.glob(f"{own_prefix()}*")}


def sweep_orphans() -> int:
    """Remove segments whose owner is gone: nobody holds their lock.

    Returns:
        The number of segments removed.
    """
    removed = 0
    for path in SHM.glob(f"{PREFIX}*"):
        if path.name.startswith(own_prefix()):
            continue
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:  # removed meanwhile, or of another user
            continue
        try:
            if is_orphan(file):
                path.unlink()
                removed += 1
        except OSError:
            continue
        finally:
            os.close(file)
    if removed:
        _log.info("removed orphaned KV segments", extra={"segments": removed})
    return removed
