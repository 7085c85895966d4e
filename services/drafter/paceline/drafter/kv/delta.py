"""The delta cache: selected positions of some layers, changed update by update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.drafter.kv.errors import KvGone
from paceline.kv.wire import WIRE_TYPES, decode
from paceline.v1 import kv_pb2

_GROWTH = 256


class DeltaCache:
    """At most a budget of positions for each layer, with keys and values unless the wire has none.

    They fill the first slots of a table in no particular order: keys are rotated already, so that
    attention does not depend on the order. One thread at a time.
    """

    def __init__(self, shape: kv_pb2.KvShape) -> None:
        """Make an empty cache.

        Raises:
            KvGone: The shape is empty, or its types are unknown.
        """
        if not (shape.layers and shape.heads and shape.head_dim):
            raise KvGone(f"the verifier described KV of an empty shape: {shape}")
        if shape.dtype not in WIRE_TYPES or shape.wire_dtype not in (0, *WIRE_TYPES):
            raise KvGone(f"the verifier sends KV of an unknown type: {shape}")
        self._layers = [_Layer(shape) for _ in range(shape.layers)]

    def __len__(self) -> int:
        """Positions per layer."""
        return len(self._layers[0].positions)

    def positions(self, index: int) -> Tensor:
        """Returns the positions of a layer, int64 ``[n]``, in the order of the table."""
        return self._layers[index].positions

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of a layer, each ``[Hkv, n, D]``; :meth:`apply` changes them."""
        layer = self._layers[index]
        keys, values = layer.planes[:, :, : len(layer.positions)]
        return keys, values

    def apply(self, messages: Sequence[kv_pb2.FollowCacheResponse], budget: int) -> None:
        """Apply one whole update.

        Args:
            messages: All its messages.
            budget: Most positions per layer after it.

        Raises:
            KvGone: It contradicts itself or earlier updates. The cache must not be used then.
        """
        committed, count = messages[-1].committed_length, len(self._layers)
        drops = [drop for message in messages for drop in message.drops]
        chunks = [chunk for message in messages for chunk in message.chunks]
        for layer in (*(drop.layer for drop in drops), *(chunk.layer for chunk in chunks)):
            if layer >= count:
                raise KvGone(f"the verifier sent layer {layer}, expected one below {count}")
        try:
            for index, table in enumerate(self._layers):
                table.apply(
                    [p for drop in drops if drop.layer == index for p in drop.positions],
                    [chunk for chunk in chunks if chunk.layer == index],
                    committed,
                )
        except (ValueError, IndexError) as error:
            raise KvGone(f"the verifier sent an update that does not fit: {error}") from error
        counts = {len(layer.positions) for layer in self._layers}
        if len(counts) > 1 or max(counts) > budget:
            raise KvGone(
                f"the verifier's update leaves {sorted(counts)} positions in the layers, expected "
                f"the same number in each, at most {budget}"
            )


class _Layer:
    """One layer: ``planes[kind, head, slot]`` is the KV of position ``positions[slot]``."""

    def __init__(self, shape: kv_pb2.KvShape) -> None:
        self.positions = torch.empty(0, dtype=torch.int64)
        self._shape = shape
        self.planes = self._new_planes(0)

    def apply(self, drops: list[int], chunks: list[kv_pb2.KvChunk], committed: int) -> None:
        """Drop positions, then write new ones into the free slots.

        Raises:
            ValueError: The update does not fit.
        """
        new = torch.tensor([p for chunk in chunks for p in chunk.positions], dtype=torch.int64)
        dropped = torch.isin(self.positions, torch.tensor(drops, dtype=torch.int64))
        free = dropped.nonzero().flatten()
        kept = self.positions[~dropped]
        if len(free) != len(drops):
            raise ValueError("it drops positions that are not in the cache")
        if len(torch.cat([kept, new]).unique()) != len(kept) + len(new):
            raise ValueError("a position comes twice")
        if len(new) and int(new.max()) >= committed:
            raise ValueError(f"position {int(new.max())} is not below {committed}")
        count = len(self.positions)
        end = max(count, len(kept) + len(new))
        slots = torch.cat([free[: len(new)], torch.arange(count, end)])
        self.positions = torch.cat([self.positions, torch.empty(end - count, dtype=torch.int64)])
        self.positions[slots] = new
        sizes = [len(chunk.positions) for chunk in chunks]
        if self._shape.wire_dtype:
            self._reserve(end)
            for chunk, written in zip(chunks, slots.split(sizes), strict=True):
                self._write(chunk, written)
        self._compact(free[len(new) :])

    def _compact(self, free: Tensor) -> None:
        """Move the last positions into the slots that stayed free."""
        count = len(self.positions) - len(free)
        used = torch.ones(len(self.positions), dtype=torch.bool)
        used[free] = False
        source, target = used[count:].nonzero().flatten() + count, free[free < count]
        if self._shape.wire_dtype:
            self.planes[:, :, target] = self.planes[:, :, source]
        self.positions[target] = self.positions[source]
        self.positions = self.positions[:count]

    def _write(self, chunk: kv_pb2.KvChunk, slots: Tensor) -> None:
        shape = self._shape
        size = (shape.heads, len(slots), shape.head_dim)
        both = ((chunk.keys, chunk.key_scales), (chunk.values, chunk.value_scales))
        for plane, (data, scales) in zip(self.planes, both, strict=True):
            plane[:, slots] = decode(data, scales, size, shape.wire_dtype, plane.dtype)

    def _reserve(self, slots: int) -> None:
        if slots > self.planes.shape[2]:
            planes = self._new_planes(-(-slots // _GROWTH) * _GROWTH)
            planes[:, :, : self.planes.shape[2]] = self.planes
            self.planes = planes

    def _new_planes(self, slots: int) -> Tensor:
        shape = self._shape
        with torch.inference_mode(False):  # else they could be written in inference mode only
            return torch.zeros(
                (2, shape.heads, slots, shape.head_dim), dtype=WIRE_TYPES[shape.dtype]
            )
