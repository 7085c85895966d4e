"""Hidden states of one cache, mapped read-only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from paceline.drafter.kv.description import ELEMENT_BYTES
from paceline.drafter.kv.errors import KvGone, KvNotShared
from paceline.drafter.kv.mapping import DTYPES, Mapped, map_segment
from paceline.shm import HEADER_BYTES, TAP_AHEAD, is_orphan, segment_path
from paceline.v1 import kv_pb2


@dataclass(frozen=True)
class _Rings:
    """A description that is sound in itself: every row lies inside the file, past its header."""

    path: Path
    byte_size: int
    dtype: kv_pb2.KvDtype
    hidden: int
    slots: int
    places: tuple[tuple[int, int], ...]
    """For each layer, where slot 0 begins and how far the next one is. Unit: elements."""


class SharedStates:
    """Outputs of chosen layers in the verifier's own memory.

    Each layer has a ring: position p lies in slot ``p % slots``. :meth:`read` copies, and makes
    sure that nothing it copied was overwritten meanwhile (see
    :class:`paceline.shm.SegmentHeader`). Otherwise the contract is that of
    :class:`paceline.drafter.kv.shared.SharedKv`.
    """

    transport: ClassVar[str] = "map"
    received: ClassVar[int] = 0
    """Bytes that came over a wire: none."""

    def __init__(
        self,
        rings: _Rings,
        window: int,
        generation: int,
        mapped: Mapped,
    ) -> None:
        """See :meth:`open`."""
        self.byte_size = rings.byte_size
        self._window = window
        self._slots = rings.slots
        self._generation = generation
        self._header = mapped.header
        self._file = mapped.file
        flat = mapped.elements(DTYPES[rings.dtype])
        self._rings = [
            flat.as_strided((rings.slots, rings.hidden), (stride, 1), start)
            for start, stride in rings.places
        ]

    @classmethod
    def open(
        cls,
        response: kv_pb2.MapCacheResponse,
        read_grant: bytes,
        layers: Sequence[int],
        window: int,
    ) -> SharedStates:
        """Map what a verifier described, having checked every word of it against the file.

        Args:
            response: The verifier's answer.
            read_grant: What it was asked with.
            layers: Layers wanted, in the order in which they are read.
            window: Positions before the committed length that are read at most; 0: all.

        Raises:
            KvNotShared: The description is wrong, or the file is not there, not ours, or not what
                was described.
        """
        rings = _read_rings(response, layers, window)
        mapped = map_segment(rings.path, rings.byte_size, response.generation, read_grant)
        return cls(rings, window, response.generation, mapped)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._file < 0

    @property
    def committed(self) -> int:
        """Positions below this may be read: all, or the last ones of the window. Unit: tokens.

        Raises:
            KvGone: The mapping was closed.
        """
        if self.closed:
            raise KvGone("this mapping was closed")
        return self._header.committed

    async def caught_up(self, committed: int, seconds: float) -> None:
        """Nothing: rows are there before anybody hears that they are committed."""

    def read(self, begin: int, end: int) -> tuple[int, Tensor]:
        """Outputs of all layers, side by side.

        Args:
            begin: First position wanted.
            end: One past the last, at most :attr:`committed`.

        Returns:
            The first position there is, ``begin`` or, where that is too old by now, a later one;
            and a copy, ``[end - first, layers * hidden]``.
        """
        begin = min(end, max(begin, self._oldest()))
        runs = self._runs(begin, end) or [slice(0)]
        states = torch.cat([torch.cat([ring[run] for run in runs]) for ring in self._rings], dim=1)
        # Some of it may have been overwritten while it was copied.
        first = min(end, max(begin, self._oldest()))
        return first, states[first - begin :]

    def check(self) -> None:
        """Make sure that the cache is still there.

        Raises:
            KvGone: The verifier released the cache or died, or the mapping was closed.
        """
        if self.closed:
            raise KvGone("this mapping was closed")
        if self._header.generation != self._generation:
            raise KvGone("the verifier released the cache")
        if is_orphan(self._file):
            raise KvGone("the verifier that held the cache is gone")

    def close(self) -> None:
        """Let go of the memory. Closing twice is safe."""
        if self.closed:
            return
        os.close(self._file)
        self._file = -1
        self._rings = []
        self._header.release()

    def _oldest(self) -> int:
        """The oldest position whose row is surely not being overwritten."""
        committed = self.committed
        kept = committed - self._window if self._window else 0
        return max(kept, committed + TAP_AHEAD - self._slots, 0)

    def _runs(self, begin: int, end: int) -> list[slice]:
        runs: list[slice] = []
        while begin < end:
            slot = begin % self._slots
            count = min(end - begin, self._slots - slot)
            runs.append(slice(slot, slot + count))
            begin += count
        return runs


def _read_rings(response: kv_pb2.MapCacheResponse, layers: Sequence[int], window: int) -> _Rings:
    """Check and convert a verifier's answer."""
    found = {described.layer: described for described in response.hidden_states}
    if len(found) != len(response.hidden_states) or set(found) != set(layers):
        raise KvNotShared(
            f"the verifier described hidden states of layers {sorted(found)}, expected each of "
            f"{sorted(layers)} once"
        )
    if response.dtype not in ELEMENT_BYTES or not response.generation:
        raise KvNotShared(
            f"the verifier named the type number {response.dtype} and the generation "
            f"{response.generation}, expected one of {sorted(ELEMENT_BYTES)}, and one above 0"
        )
    first = found[layers[0]]
    common = (first.posix.name, first.posix.byte_size, first.hidden_size, first.slots)
    for each in found.values():
        if (each.posix.name, each.posix.byte_size, each.hidden_size, each.slots) != common:
            raise KvNotShared("the verifier described hidden states that differ in memory or shape")
    if not first.hidden_size or first.slots < window + TAP_AHEAD:
        raise KvNotShared(
            f"the verifier keeps {first.slots} hidden states of {first.hidden_size} elements, "
            f"expected at least {window + TAP_AHEAD} that are not empty"
        )
    try:
        path = segment_path(first.posix.name.removeprefix("/"))
    except ValueError as error:
        raise KvNotShared(f"the verifier named a memory that is no segment: {error}") from error
    element = ELEMENT_BYTES[response.dtype]
    return _Rings(
        path=path,
        byte_size=first.posix.byte_size,
        dtype=response.dtype,
        hidden=first.hidden_size,
        slots=first.slots,
        places=tuple(_place(found[layer], element) for layer in layers),
    )


def _place(described: kv_pb2.HiddenStateSegment, element: int) -> tuple[int, int]:
    start, stride = described.offset, described.position_stride
    row, size = described.hidden_size * element, described.posix.byte_size
    end = start + (described.slots - 1) * stride + row
    if start < HEADER_BYTES or end > size or stride < row or (start | stride) % element:
        raise KvNotShared(
            f"the verifier described hidden states from byte {start} to {end}, {stride} apart, in "
            f"a file of {size} bytes with a header of {HEADER_BYTES}"
        )
    return start // element, stride // element
