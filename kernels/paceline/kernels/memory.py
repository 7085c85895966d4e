"""Memory for weights: aligned, on huge pages, cut from large chunks."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes; a cache line."""

_CHUNK = 32 << 20
_HUGE = 2 << 20


class _Chunks:
    """Cuts tensors from chunks of anonymous memory; a chunk is freed with its last tensor.

    One system page a tensor would keep matrices below 2 MiB off huge pages, and a step that reads
    all weights would miss the address cache on each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> Tensor:
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if padded > len(self._chunk):
                self._chunk = _map(max(padded, _CHUNK))
            tensor, self._chunk = self._chunk[:size], self._chunk[padded:]
        return tensor


def _map(size: int) -> Tensor:
    """uint8 zeros that start at a multiple of a huge page."""
    memory = mmap.mmap(-1, size + _HUGE)
    with suppress(AttributeError, OSError):  # a kernel or system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    return whole[start : start + size]


allocate = _Chunks().allocate
"""``allocate(size) -> Tensor``: uint8 zeros ``[size]`` at a multiple of ``ALIGNMENT``."""
