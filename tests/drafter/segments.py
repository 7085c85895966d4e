"""Segments as a verifier leaves them, and true descriptions of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from paceline.v1 import kv_pb2
from paceline.verifier.kv.layout import KvLayout
from paceline.verifier.kv.segment import Segment

GRANT = bytes(range(16))
GENERATION = 7
LAYERS, HEADS, DIM, CAPACITY = 3, 2, 4, 512
COMMITTED = 200


@contextmanager
def new_segment(dtype: torch.dtype = torch.float32) -> Iterator[Segment]:
    """A cache with 200 committed positions of random KV."""
    segment = Segment(KvLayout(LAYERS, HEADS, DIM, dtype), CAPACITY)
    try:
        segment.header.open(GENERATION, hashlib.sha256(GRANT).digest())
        segment.reserve(COMMITTED)
        segment.kv[..., : segment.reserved, :].normal_()
        segment.publish(COMMITTED)
        yield segment
    finally:
        segment.close()


def describe(segment: Segment, layers: Iterable[int] = range(LAYERS)) -> kv_pb2.MapCacheResponse:
    """What an honest verifier says of it."""
    size = segment.kv.element_size()
    kinds = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
    response = kv_pb2.MapCacheResponse(
        dtype=kv_pb2.KvDtype.ValueType(kinds[segment.kv.dtype]),
        committed_length=segment.header.committed,
        generation=GENERATION,
        lease_ms=30_000,
    )
    for layer in layers:
        for kind in (0, 1):
            plane = segment.kv[layer, kind]
            response.segments.add(
                layer=layer,
                is_value=bool(kind),
                posix=kv_pb2.PosixSharedMemory(
                    name=f"/{segment.name}", byte_size=segment.byte_size
                ),
                offset=4096 + (plane.data_ptr() - segment.kv.data_ptr()),
                head_stride=plane.stride(0) * size,
                position_stride=plane.stride(1) * size,
                heads=HEADS,
                head_dim=DIM,
                capacity=CAPACITY,
            )
    return response
