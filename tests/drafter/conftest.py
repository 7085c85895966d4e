"""A drafter service that has joined a fake verifier, in this process."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from calls import started
from distributions import write_distribution
from fakes import drafter as fake_drafter
from fakes.exchange import VOCAB as VOCAB
from fakes.exchange import ExchangeServicer, Peer, Share, Text, fake_verifier, share_nothing

from paceline.drafter import DrafterSpec
from paceline.drafter.service import build_service
from paceline.service import ServerOptions, run_server
from paceline.v1 import drafter_pb2, drafter_pb2_grpc

from . import drafting_methods


@pytest.fixture(autouse=True, scope="session")
def registered_methods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Registers the methods of the tests in this process."""
    methods = {**fake_drafter.METHODS, **drafting_methods.METHODS}
    folder = write_distribution(tmp_path_factory.mktemp("methods"), methods)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


@dataclass
class Drafting:
    """A running service in a test."""

    address: str
    verifier: ExchangeServicer  # that it joins
    peer: Peer  # its first connection there
    registry: Any  # stub of its registry
    stop: asyncio.Event  # set it to drain and stop the service
    service: Any

    async def open(self, tokens: Sequence[int], **fields: Any) -> Text:
        """Open a sequence and wait until it is."""
        return await self.peer.open(tokens, **fields)


def running(service: Any, address: str, drain_seconds: float = 0.1) -> Any:
    """Run a service for the body, see `started`."""
    return started(run_server, service, ServerOptions(address, drain_seconds=drain_seconds))


@asynccontextmanager
async def drafting(
    *specs: str,
    carrier: str = "socket",
    drain_seconds: float = 0.1,
    target: dict[str, Any] | None = None,  # facts of it, fields of Joined
    share: Share = share_nothing,  # gives the memory of the verifier's caches
    credentials: grpc.ServerCredentials | None = None,  # of the verifier
    **options: Any,
) -> AsyncIterator[Drafting]:
    """Serve drafters on a unix socket, joined to a fake verifier."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        address = f"unix:{folder}/drafter"
        async with fake_verifier(folder, carrier, share, credentials) as verifier:
            for field, value in (target or {}).items():
                setattr(verifier.joined, field, value)
            service = build_service(
                [DrafterSpec.parse(spec) for spec in specs], verifiers=[verifier.address], **options
            )
            async with running(service, address, drain_seconds) as (_, stop, _):
                peer = await verifier.peer()
                assert peer.carrier == carrier
                async with grpc.aio.insecure_channel(address) as channel:
                    registry = drafter_pb2_grpc.DrafterRegistryServiceStub(channel)
                    yield Drafting(address, verifier, peer, registry, stop, service)


async def load(service: Drafting, name: str, method: str, **fields: Any) -> drafter_pb2.DrafterInfo:
    request = drafter_pb2.LoadDrafterRequest(name=name, method=method, **fields)
    return (await service.registry.LoadDrafter(request)).drafter


async def unload(service: Drafting, name: str, version: str = "", *, force: bool = False) -> bool:
    request = drafter_pb2.UnloadDrafterRequest(name=name, version=version, force=force)
    return (await service.registry.UnloadDrafter(request)).unloaded


async def activate(
    service: Drafting, name: str, version: str, share: float = 1.0
) -> drafter_pb2.DrafterInfo:
    request = drafter_pb2.ActivateDrafterRequest(name=name, version=version, traffic_share=share)
    return (await service.registry.ActivateDrafter(request)).drafter


async def listed(service: Drafting) -> list[tuple[str, str, float, int, bool]]:
    answer = await service.registry.ListDrafters(drafter_pb2.ListDraftersRequest())
    return [
        (d.name, d.version, d.traffic_share, d.active_streams, d.draining) for d in answer.drafters
    ]


@pytest.fixture(autouse=True, scope="session")
def patience() -> Iterator[None]:
    """A slow verifier is no failure here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.drafter.kv.exchange.CALL_SECONDS", 60.0)
        patch.setattr("paceline.drafter.exchange.JOIN_SECONDS", 60.0)
        patch.setattr("paceline.drafter.exchange.REACH_SECONDS", 60.0)
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model for `lm`."""
    from .models import write_model  # slow to import, and most tests do not need it

    return write_model(tmp_path_factory.mktemp("lm") / "model")


@pytest.fixture(params=["socket", "stream"])
async def ngram(request: pytest.FixtureRequest) -> AsyncIterator[Drafting]:
    """A service with one ngram drafter, with each carrier."""
    async with drafting("ngram=ngram", carrier=request.param) as service:
        yield service
