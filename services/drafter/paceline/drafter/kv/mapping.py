"""Maps a verifier's shared-memory file read-only, after checking it against its description."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import warnings
from pathlib import Path

import torch
from torch import Tensor

from paceline.drafter.kv.description import FileDescription
from paceline.drafter.kv.errors import KvGone, KvNotShared
from paceline.drafter.kv.reader import CacheReader
from paceline.kv.segment import SegmentHeader, is_orphan
from paceline.kv.wire import STATE_TYPES


class MappedReader(CacheReader):
    """Reads a cache whose file is mapped read-only.

    The file must belong to the drafter's own user, and its header must hold the digest of the read
    grant. So a malicious verifier cannot make the drafter open any other file.

    Safety contract (see :class:`paceline.kv.segment.SegmentHeader` for the writer's side):

    - Read positions below :attr:`committed` only. They never change. Those at or above it change at
      any time, and reading far above may allocate memory, or end the process (SIGBUS).
    - Never write: the pages are mapped read-only, but torch does not enforce it: a write ends
      the process (SIGSEGV). So pass the tensors to no in-place operation.
    - Tensors keep the mapping alive: they may outlive :meth:`close`, and keep the memory.
    """

    byte_size = 0

    def __init__(self, description: FileDescription, read_grant: bytes, capacity: int) -> None:
        """Map.

        Args:
            description: The file, as the verifier described it.
            read_grant: Read grant of the cache.
            capacity: Positions of the cache. Unit: tokens.

        Raises:
            KvNotShared: The file is missing, belongs to another user, or is not as described.
        """
        path = description.path
        self._generation = description.generation
        self._dtype = STATE_TYPES[description.dtype]
        self._capacity = capacity
        self._file = _open(path, description.byte_size)
        try:
            self._memory = mmap.mmap(self._file, description.byte_size, prot=mmap.PROT_READ)
            self._header = SegmentHeader(self._memory)
            digest = hashlib.sha256(read_grant).digest()
            found = (self._header.valid, self._header.generation, self._header.grant_digest)
            if found != (True, self._generation, digest):
                raise KvNotShared(f"{path} is not, or no longer, the cache of this read grant")
        except (OSError, ValueError) as error:
            os.close(self._file)
            raise KvNotShared(f"cannot map {path}: {error}") from error
        except BaseException:
            os.close(self._file)
            raise

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._file < 0

    @property
    def committed(self) -> int:
        """Committed length now, without a call to the verifier. Unit: tokens.

        Raises:
            KvGone: The mapping was closed.
        """
        self._check_open()
        return min(self._header.committed, self._capacity)

    def check(self) -> None:
        """Check that the cache still exists, by its header and its owner's lock.

        The memory keeps its contents after a release or the end of the verifier, so what was read
        before a failing check is useless, but never another cache's.

        Raises:
            KvGone: The verifier released the cache or has ended, or the mapping was closed.
        """
        self._check_open()
        if self._header.generation != self._generation:
            raise KvGone("the verifier released the cache")
        if is_orphan(self._file):
            raise KvGone("the verifier of the cache has ended")

    def close(self) -> None:
        """Close the file and drop the mapping. Closing twice is safe."""
        if not self.closed:
            os.close(self._file)
            self._file = -1
            self._header.release()
            del self._memory

    def _elements(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the whole file as elements of a type (default: of hidden states), read-only."""
        dtype = dtype or self._dtype
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            count = len(self._memory) // dtype.itemsize
            return torch.frombuffer(self._memory, dtype=dtype, count=count)

    def _check_open(self) -> None:
        if self.closed:
            raise KvGone("this mapping was closed")


def _open(path: Path, byte_size: int) -> int:
    """Open a regular file of this user and of this size."""
    try:
        # O_NONBLOCK: if the name is a pipe, open() must not wait.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(path, flags)
    except OSError as error:
        raise KvNotShared(
            f"cannot open {path}: {error.strerror}; run drafter and verifier on one machine, as "
            "one user, with one /dev/shm"
        ) from error
    status = os.fstat(file)
    wrong = None
    if not stat.S_ISREG(status.st_mode):
        wrong = "is not a regular file"
    elif status.st_uid != os.geteuid():
        wrong = f"belongs to user {status.st_uid}, expected {os.geteuid()}"
    elif status.st_size != byte_size:
        wrong = f"has {status.st_size} bytes, expected {byte_size} as described"
    if wrong is not None:
        os.close(file)
        raise KvNotShared(f"{path} {wrong}")
    return file
