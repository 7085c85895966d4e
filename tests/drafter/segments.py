"""Segments as a verifier writes them, and their descriptions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from paceline.kv.wire import cache_dtype
from paceline.v1 import kv_pb2
from paceline.verifier.kv.layout import KvLayout
from paceline.verifier.kv.segment import Segment

GRANT = bytes(range(16))
GENERATION = 7
LAYERS, HEADS, DIM, CAPACITY = 3, 2, 4, 512
COMMITTED = 200


@contextmanager
def new_segment() -> Iterator[Segment]:
    """A cache with 200 committed positions of random KV."""
    segment = Segment(KvLayout(LAYERS, HEADS, DIM, torch.float32), CAPACITY)
    try:
        segment.header.open(GENERATION, hashlib.sha256(GRANT).digest())
        segment.reserve(COMMITTED)
        segment.kv[..., : segment.reserved, :].normal_()
        segment.publish(COMMITTED)
        yield segment
    finally:
        segment.close()


def describe(segment: Segment, layers: Iterable[int] = range(LAYERS)) -> kv_pb2.MapCacheResponse:
    """A verifier's description of it."""
    return kv_pb2.MapCacheResponse(
        file=segment.describe_file(),
        dtype=cache_dtype(segment.layout.dtype),
        committed_length=segment.header.committed,
        generation=GENERATION,
        lease_ms=30_000,
        kv=segment.describe(layers),
    )
