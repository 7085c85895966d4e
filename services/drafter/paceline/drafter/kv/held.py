"""Chosen positions, with or without copies of their KV, changed update by update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from paceline.drafter.kv.errors import KvGone
from paceline.kvwire import WIRE_TYPES, decode
from paceline.v1 import kv_pb2

_GROWTH = 256
_Part = TypeVar("_Part", kv_pb2.KvDrop, kv_pb2.KvChunk)


class HeldPositions:
    """At most a budget of positions for each followed layer, in no order. One thread at a time."""

    def __init__(self, shape: kv_pb2.KvShape) -> None:
        """Hold nothing yet.

        Raises:
            KvGone: The shape makes no sense.
        """
        if not (shape.layers and shape.heads and shape.head_dim):
            raise KvGone(f"the verifier described KV of an empty shape: {shape}")
        self._layers: Sequence[_Slots] = [_Slots() for _ in range(shape.layers)]

    def __len__(self) -> int:
        """Positions of each layer."""
        return len(self._layers[0].positions)

    def positions(self, index: int) -> Tensor:
        """Positions of a layer, int64 ``[n]``."""
        return self._layers[index].positions

    def apply(self, messages: Sequence[kv_pb2.FollowCacheResponse], budget: int) -> None:
        """Take in one whole update.

        Args:
            messages: All of it.
            budget: Most positions it may leave in a layer.

        Raises:
            KvGone: It contradicts itself, or what was sent before. Nothing can be relied on then.
        """
        committed = messages[-1].committed_length
        drops = _by_layer(chain.from_iterable(m.drops for m in messages), len(self._layers))
        chunks = _by_layer(chain.from_iterable(m.chunks for m in messages), len(self._layers))
        try:
            for table, gone, fresh in zip(self._layers, drops, chunks, strict=True):
                table.change(gone, fresh, committed)
        except (ValueError, IndexError) as error:
            raise KvGone(f"the verifier sent an update that does not fit: {error}") from error
        counts = {len(table.positions) for table in self._layers}
        if len(counts) > 1 or max(counts) > budget:
            raise KvGone(
                f"the verifier's update leaves {sorted(counts)} positions in the layers, expected "
                f"one number of at most {budget}"
            )


class _Slots:
    """One layer: ``positions[slot]``."""

    def __init__(self) -> None:
        self.positions = torch.empty(0, dtype=torch.int64)

    def change(
        self, drops: Sequence[kv_pb2.KvDrop], chunks: Sequence[kv_pb2.KvChunk], committed: int
    ) -> None:
        """Forget and take in positions; new ones go where old ones were."""
        gone = torch.tensor([p for drop in drops for p in drop.positions], dtype=torch.int64)
        new = torch.tensor([p for chunk in chunks for p in chunk.positions], dtype=torch.int64)
        dropped = torch.isin(self.positions, gone)
        free = dropped.nonzero().flatten()
        kept = self.positions[~dropped]
        if len(free) != len(gone):
            raise ValueError("positions are dropped that are not held")
        if len(torch.cat([kept, new]).unique()) != len(kept) + len(new):
            raise ValueError("a position comes twice")
        if len(new) and int(new.max()) >= committed:
            raise ValueError(f"position {int(new.max())} is not below {committed}")
        count = len(self.positions)
        stop = max(count, len(kept) + len(new))
        slots = torch.cat([free[: len(new)], torch.arange(count, stop)])
        self._reserve(stop)
        sizes = [len(chunk.positions) for chunk in chunks]
        for chunk, where in zip(chunks, slots.split(sizes), strict=True):
            self._write(chunk, where)
        grown = torch.empty(stop, dtype=torch.int64)
        grown[:count] = self.positions
        grown[slots] = new
        self.positions = self._close_gaps(grown, free[len(new) :])

    def _close_gaps(self, positions: Tensor, gaps: Tensor) -> Tensor:
        """Move the last ones into the gaps."""
        count = len(positions) - len(gaps)
        stays = torch.ones(len(positions), dtype=torch.bool)
        stays[gaps] = False
        last = stays[count:].nonzero().flatten() + count
        holes = gaps[gaps < count]
        self._move(holes, last)
        positions[holes] = positions[last]
        return positions[:count]

    def _reserve(self, slots: int) -> None:
        """There will be so many slots."""

    def _write(self, chunk: kv_pb2.KvChunk, slots: Tensor) -> None:
        """What a chunk brings goes there."""

    def _move(self, to: Tensor, slots: Tensor) -> None:
        """What is in some slots goes to others."""


class HeldKv(HeldPositions):
    """K and V of the positions too.

    They fill the first slots of a table in no particular order: keys are rotated already, so that
    attention needs to know of no position.
    """

    def __init__(self, shape: kv_pb2.KvShape) -> None:
        """Hold nothing yet.

        Raises:
            KvGone: The shape makes no sense, or its types are none that can be held.
        """
        super().__init__(shape)
        if shape.wire_dtype not in WIRE_TYPES or shape.dtype not in WIRE_TYPES:
            raise KvGone(f"the verifier sends KV of an unknown type: {shape}")
        self._layers: Sequence[_Table] = [_Table(shape) for _ in range(shape.layers)]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each ``[Hkv, n, D]``; views that :meth:`apply` changes."""
        table = self._layers[index]
        count = len(table.positions)
        return table.planes[0, :, :count], table.planes[1, :, :count]


class _Table(_Slots):
    """One layer: ``planes[kind, head, slot]`` holds position ``positions[slot]``."""

    def __init__(self, shape: kv_pb2.KvShape) -> None:
        super().__init__()
        self._shape = shape
        self.planes = self._new(0)

    def _move(self, to: Tensor, slots: Tensor) -> None:
        self.planes[:, :, to] = self.planes[:, :, slots]

    def _write(self, chunk: kv_pb2.KvChunk, slots: Tensor) -> None:
        shape = self._shape
        size = (shape.heads, len(slots), shape.head_dim)
        both = ((chunk.keys, chunk.key_scales), (chunk.values, chunk.value_scales))
        for plane, (data, scales) in zip(self.planes, both, strict=True):
            plane[:, slots] = decode(data, scales, size, shape.wire_dtype, plane.dtype)

    def _reserve(self, slots: int) -> None:
        if slots > self.planes.shape[2]:
            grown = self._new(-(-slots // _GROWTH) * _GROWTH)
            grown[:, :, : self.planes.shape[2]] = self.planes
            self.planes = grown

    def _new(self, slots: int) -> Tensor:
        shape = self._shape
        with torch.inference_mode(False):  # or it could only be written in inference mode
            return torch.zeros(
                (2, shape.heads, slots, shape.head_dim), dtype=WIRE_TYPES[shape.dtype]
            )


def _by_layer(parts: Iterable[_Part], layers: int) -> list[list[_Part]]:
    sorted_parts: list[list[_Part]] = [[] for _ in range(layers)]
    for part in parts:
        if part.layer >= layers:
            raise KvGone(f"the verifier sent layer {part.layer}, expected one below {layers}")
        sorted_parts[part.layer].append(part)
    return sorted_parts
