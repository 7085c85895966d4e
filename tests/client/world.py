"""A fake verifier and a fake registry over real gRPC on unix sockets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from paceline.v1 import drafter_pb2_grpc, verifier_pb2_grpc

from .fake_registry import FakeRegistry
from .fake_verifier import FakeVerifier


class Service:
    """A servicer on a unix socket that can be stopped hard and started again."""

    def __init__(self, path: Path, register: Callable[[grpc.aio.Server], None]) -> None:
        self.address = f"unix:{path}"
        self._register = register
        self._server: grpc.aio.Server | None = None

    @property
    def running(self) -> bool:
        return self._server is not None

    async def start(self) -> None:
        self._server = grpc.aio.server()
        self._register(self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None


def verifier_service(path: Path, verifier: FakeVerifier) -> Service:
    """A service of a fake verifier."""
    return Service(
        path,
        lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server),
    )


def registry_service(path: Path, registry: FakeRegistry) -> Service:
    """A service of a fake registry."""

    def register(server: grpc.aio.Server) -> None:
        drafter_pb2_grpc.add_DrafterRegistryServiceServicer_to_server(registry, server)

    return Service(path, register)


@dataclass
class World:
    """Both fakes, running."""

    verifier: FakeVerifier
    registry: FakeRegistry
    verifier_service: Service
    registry_service: Service

    @property
    def addresses(self) -> tuple[str, str]:
        return self.verifier_service.address, self.registry_service.address


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[World]:
    verifier = FakeVerifier()
    service = verifier_service(folder / "v", verifier)
    registry = FakeRegistry({service.address: verifier})
    world = World(verifier, registry, service, registry_service(folder / "d", registry))
    await world.verifier_service.start()
    await world.registry_service.start()
    try:
        yield world
    finally:
        await world.registry_service.stop()
        await world.verifier_service.stop()
