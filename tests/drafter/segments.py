"""Segments as a verifier writes them, and a verifier that names one."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import torch

from paceline.v1 import kv_pb2, kv_pb2_grpc
from paceline.verifier.kv.base import SequenceKv
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


def change_layout(segment: SequenceKv, **fields: Any) -> None:
    """Set fields of the layout in a segment's header."""
    layout = segment.header.layout
    for path, value in fields.items():
        *parents, field = path.split("__")
        message: Any = layout
        for name in parents:
            message = getattr(message, name)
        if isinstance(value, list):
            message.ClearField(field)
            getattr(message, field).extend(value)
        else:
            setattr(message, field, value)
    segment.header.describe(layout)


class KvVerifier(kv_pb2_grpc.KvExchangeServiceServicer):
    """A verifier with one cache."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.hangs = False
        """It does not answer."""
        self.requests: list[kv_pb2.MapCacheRequest] = []
        self.metadata: list[dict[str, Any]] = []

    async def MapCache(self, request: kv_pb2.MapCacheRequest, context: Any) -> Any:
        self.requests.append(request)
        if self.hangs:
            await asyncio.Event().wait()
        self.metadata.append(dict(context.invocation_metadata() or ()))
        if request.read_grant != GRANT:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no cache has this read grant")
        file = kv_pb2.PosixSharedMemory(name=f"/{self.segment.name}")
        return kv_pb2.MapCacheResponse(file=file)

    def add(self, server: Any) -> None:
        """Add it to a server."""
        kv_pb2_grpc.add_KvExchangeServiceServicer_to_server(self, server)
