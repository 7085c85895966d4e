"""A verifier with one cache, whose descriptions a test can change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from paceline.v1 import kv_pb2, kv_pb2_grpc
from paceline.verifier.kv.segment import Segment

from .segments import GRANT, LAYERS, describe

Change = Callable[[kv_pb2.MapCacheResponse], object]


class KvVerifier(kv_pb2_grpc.KvExchangeServiceServicer):
    """Describes the segment, after ``change``."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.hangs = False
        """It does not answer."""
        self.change: Change = lambda response: None
        self.requests: list[kv_pb2.MapCacheRequest] = []
        self.metadata: list[dict[str, Any]] = []

    async def MapCache(self, request: kv_pb2.MapCacheRequest, context: Any) -> Any:
        self.requests.append(request)
        if self.hangs:
            await asyncio.Event().wait()
        self.metadata.append(dict(context.invocation_metadata() or ()))
        if request.read_grant != GRANT:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no cache has this read grant")
        response = describe(self.segment, request.layers or range(LAYERS))
        self.change(response)
        return response

    def add(self, server: Any) -> None:
        """Add it to a server."""
        kv_pb2_grpc.add_KvExchangeServiceServicer_to_server(self, server)
