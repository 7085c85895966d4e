"""A verifier with one cache, whose descriptions a test can change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
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
        self.change: Change = lambda response: None
        self.requests: list[kv_pb2.MapCacheRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.address = ""

    async def MapCache(self, request: kv_pb2.MapCacheRequest, context: Any) -> Any:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        if request.read_grant != GRANT:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no cache has this read grant")
        response = describe(self.segment, request.layers or range(LAYERS))
        self.change(response)
        return response


@asynccontextmanager
async def kv_verifier(
    segment: Segment, folder: Path, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[KvVerifier]:
    """Serve it on a unix socket; with credentials, on a port of the loopback."""
    verifier = KvVerifier(segment)
    server = grpc.aio.server()
    kv_pb2_grpc.add_KvExchangeServiceServicer_to_server(verifier, server)
    if credentials is None:
        verifier.address = f"unix:{folder}/verifier"
        server.add_insecure_port(verifier.address)
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
        verifier.address = f"127.0.0.1:{port}"
    await server.start()
    try:
        yield verifier
    finally:
        await server.stop(0)
