"""The standard health and reflection services. Needs the `server` extra."""

# The stubs of grpc_health know no aio.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection


class HealthStatus:
    """What `grpc.health.v1.Health` says about a server and each of its services."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    @classmethod
    async def serving(cls, names: Sequence[str], server: grpc.aio.Server) -> Self:
        """Add health, with `names` and the server itself SERVING, and reflection to `server`."""
        servicer = health.aio.HealthServicer()
        for name in names:
            await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        reflected = (*names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, server)
        return cls(servicer)

    async def shutting_down(self) -> None:
        """Everything is NOT_SERVING from now on."""
        await self._servicer.enter_graceful_shutdown()
