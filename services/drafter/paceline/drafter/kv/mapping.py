"""Mapping a verifier's segment read-only, every word about it checked against the file."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.drafter.kv.errors import KvNotShared
from paceline.shm import SegmentHeader
from paceline.v1 import kv_pb2

DTYPES = {
    kv_pb2.KV_DTYPE_FLOAT32: torch.float32,
    kv_pb2.KV_DTYPE_FLOAT16: torch.float16,
    kv_pb2.KV_DTYPE_BFLOAT16: torch.bfloat16,
}


@dataclass(frozen=True)
class Mapped:
    """A mapped segment.

    Attributes:
        memory: The pages, read-only.
        header: What its owner says in them.
        file: Open file, whose lock tells whether the owner lives. Whoever has it closes it.
    """

    memory: mmap.mmap
    header: SegmentHeader
    file: int

    def elements(self, dtype: torch.dtype) -> Tensor:
        """All of the file as elements of a type; not to be written, see ``SharedKv``."""
        with warnings.catch_warnings():
            # That it is read-only is what we want; the contract says what follows from it.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            count = len(self.memory) // dtype.itemsize
            return torch.frombuffer(self.memory, dtype=dtype, count=count)


def map_segment(path: Path, byte_size: int, generation: int, read_grant: bytes) -> Mapped:
    """Map the segment of a cache.

    A lying verifier can make the drafter open nothing but a segment of the drafter's own user
    whose read grant is this one.

    Args:
        path: As described; by its name a segment.
        byte_size: Size it must have.
        generation: The cache's.
        read_grant: The cache's.

    Raises:
        KvNotShared: The file is not there, not ours, or not what was described.
    """
    file = _open(path, byte_size)
    try:
        mapping = mmap.mmap(file, byte_size, prot=mmap.PROT_READ)
        header = SegmentHeader(mapping)
        digest = hashlib.sha256(read_grant).digest()
        if (header.valid, header.generation, header.grant_digest) != (True, generation, digest):
            raise KvNotShared(f"{path} is not, or no longer, the cache of this read grant")
        return Mapped(mapping, header, file)
    except (OSError, ValueError) as error:
        os.close(file)
        raise KvNotShared(f"cannot map {path}: {error}") from error
    except BaseException:
        os.close(file)
        raise


def _open(path: Path, byte_size: int) -> int:
    """The segment's file: of this user, and as large as it was described."""
    try:
        # Not blocking: whatever may be there instead of a file, a pipe say, must not hold us up.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(path, flags)
    except OSError as error:
        raise KvNotShared(
            f"cannot open {path}: {error.strerror}; run drafter and verifier on one machine, as "
            "one user, with one /dev/shm"
        ) from error
    facts = os.fstat(file)
    wrong = None
    if not stat.S_ISREG(facts.st_mode):
        wrong = "is no regular file"
    elif facts.st_uid != os.geteuid():
        wrong = f"belongs to user {facts.st_uid}, expected {os.geteuid()}"
    elif facts.st_size != byte_size:
        wrong = f"has {facts.st_size} bytes, described were {byte_size}"
    if wrong is not None:
        os.close(file)
        raise KvNotShared(f"{path} {wrong}")
    return file
