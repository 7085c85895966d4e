"""The drafter service: registry, drafting thread and the verifiers that it joins."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from paceline.device import Device, find_device
from paceline.drafter.connection import ServiceParts
from paceline.drafter.exchange import Exchange
from paceline.drafter.kv.exchange import KvExchange, VerifierAccess
from paceline.drafter.methods.base import Drafter, LoadError, Resources
from paceline.drafter.options import DrafterOptions
from paceline.drafter.registry import Loader, Registry
from paceline.drafter.spec import DrafterSpec, Roots
from paceline.drafter.worker import DraftWorker
from paceline.service import Service, ServiceError
from paceline.service.phases import phases
from paceline.service.runtime import trim
from paceline.telemetry.tracing import tracer
from paceline.v1 import drafter_pb2, drafter_pb2_grpc

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger("paceline.drafter")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class DrafterRegistryServicer(drafter_pb2_grpc.DrafterRegistryServiceServicer):
    """Lists, loads, activates, rolls back and unloads versions while generations run.

    The joined verifiers list a change before its response is sent.
    """

    def __init__(self, parts: ServiceParts, exchange: Exchange) -> None:
        self._registry, self._exchange = parts.registry, exchange

    async def ListDrafters(
        self, request: drafter_pb2.ListDraftersRequest, context: Context
    ) -> drafter_pb2.ListDraftersResponse:
        """List all versions and verifiers."""
        return drafter_pb2.ListDraftersResponse(
            drafters=[version.info() for version in self._registry.versions()],
            default_drafter=self._registry.default_name,
            verifiers=self._exchange.links(),
        )

    async def LoadDrafter(
        self, request: drafter_pb2.LoadDrafterRequest, context: Context
    ) -> drafter_pb2.LoadDrafterResponse:
        """Load a version; respond when it can be used."""
        try:
            spec = DrafterSpec(
                name=request.name,
                method=request.method,
                folder=Path(request.folder) if request.folder else None,
                options=dict(request.options),
                version=request.version,
            )
            version = await self._registry.load(spec, activate=request.activate)
        except LoadError as error:
            raise ServiceError.invalid_argument(error.reason, str(error)) from error
        await self._changed(
            "loaded", drafter=spec.name, version=version.version, method=spec.method
        )
        return drafter_pb2.LoadDrafterResponse(drafter=version.info())

    async def ActivateDrafter(
        self, request: drafter_pb2.ActivateDrafterRequest, context: Context
    ) -> drafter_pb2.ActivateDrafterResponse:
        """Give a version a share of new generations."""
        share = request.traffic_share or 1.0
        version = self._registry.activate(request.name, request.version, share)
        await self._changed(
            "activated", drafter=request.name, version=version.version, share=version.share
        )
        return drafter_pb2.ActivateDrafterResponse(drafter=version.info())

    async def RollbackDrafter(
        self, request: drafter_pb2.RollbackDrafterRequest, context: Context
    ) -> drafter_pb2.RollbackDrafterResponse:
        """Restore the shares from before the last activation."""
        active = self._registry.rollback(request.name)
        names = [version.version for version in active]
        await self._changed("rolled back", drafter=request.name, versions=names)
        return drafter_pb2.RollbackDrafterResponse(drafters=[version.info() for version in active])

    async def UnloadDrafter(
        self, request: drafter_pb2.UnloadDrafterRequest, context: Context
    ) -> drafter_pb2.UnloadDrafterResponse:
        """Remove versions; those in use are freed with their last sequence."""
        unloaded = self._registry.unload(request.name, request.version, force=request.force)
        await self._changed(
            "unloading", drafter=request.name, version=request.version, done=unloaded
        )
        return drafter_pb2.UnloadDrafterResponse(unloaded=unloaded)

    async def _changed(self, what: str, **extra: object) -> None:
        """Wait until the joined verifiers list a change, and log it."""
        await self._exchange.listed()
        logger.info("drafter %s", what, extra=extra)


class DrafterService:
    """Drafter and registry as one service (see :class:`paceline.service.Service`).

    :meth:`stop` closes the drafters on the worker's thread, after every sequence that was handed to
    it, and then ends the thread.
    """

    service_names = ("paceline.v1.DrafterRegistryService",)
    message_bytes: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self, load: Sequence[DrafterSpec], parts: ServiceParts, exchange: Exchange, device: Device
    ) -> None:
        self.exchange = exchange  # the verifiers
        self._load, self._parts, self._device = list(load), parts, device

    def facts(self) -> dict[str, object]:
        """Return the drafters, their device and the verifiers to join, for the log."""
        return {
            "drafters": [
                f"{version.spec.name}@{version.version} ({version.spec.method})"
                for version in self._parts.registry.versions()
            ],
            "device": str(self._device),
            "verifiers": [link.address for link in self.exchange.links()],
        }

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        servicer = DrafterRegistryServicer(self._parts, self.exchange)
        drafter_pb2_grpc.add_DrafterRegistryServiceServicer_to_server(servicer, server)

    async def start(self) -> None:
        """Load the drafters of the command line, then join verifiers. Raises ``LoadError`` if a
        drafter of the command line cannot be loaded."""
        self._parts.worker.start()
        for spec in self._load:
            phases.begin(f"loading {spec.name}")
            await self._parts.registry.load(spec)
        await self.exchange.start()

    async def fault(self) -> None:
        """Wait until the device is lost: every other failure concerns one drafter, sequence or
        verifier. Raises ``DeviceLost`` then."""
        await self._parts.worker.lost()

    async def drain(self) -> None:
        """Refuse new sequences, and return when verifiers have closed all open ones."""
        await self.exchange.drain()

    async def stop(self) -> None:
        """Free all drafters, end the worker, and disconnect from verifiers."""
        parts = self._parts
        await self.exchange.close()
        await parts.kv.close()
        parts.registry.close()
        parts.worker.stop()


def build_service(
    load: Sequence[DrafterSpec],
    *,
    access: VerifierAccess | None = None,
    metrics: CollectorRegistry | None = None,
    **options: Any,
) -> Service:
    """Create a drafter service, for :func:`paceline.service.run_server`.

    Args:
        load: Drafters to load at start; the first is the default. May be empty: drafters can be
            loaded over gRPC too.
        access: Credentials for the verifiers; None: no token and no TLS.
        metrics: Registry of metrics to add its metrics to; None: no metrics.
        options: Fields of :class:`~paceline.drafter.options.DrafterOptions`.

    Raises ``LoadError`` if a method is unknown or cannot be imported, ``OptionsError`` if the TLS
    authorities of ``access`` cannot be read, or the address of a verifier is malformed, ``OSError``
    if another TLS file of it cannot be read, ``ValueError`` if there is no such device, and
    ``TypeError`` if an option is unknown.
    """
    chosen = DrafterOptions(**options)
    drafted_on = find_device(chosen.device, preferred=1)
    kv = KvExchange(access or VerifierAccess(), drafted_on)
    # Drafts need not be the same on every machine.
    resources = Resources(drafted_on, chosen.threads, "auto")
    worker = DraftWorker(drafted_on, overlap=chosen.overlap)
    registry = _registry(load, chosen.roots, resources, worker)
    parts = ServiceParts(
        registry=registry,
        worker=worker,
        kv=kv,
        metrics=None,
        tracer=tracer(),
        max_context=chosen.max_context,
        max_sequences=chosen.max_streams,
    )
    exchange = Exchange(chosen.verifiers, parts)
    if metrics is not None:
        # Imported here, because prometheus_client is only needed for metrics.
        from paceline.drafter.metrics import DrafterMetrics

        parts.metrics = DrafterMetrics(metrics, registry, worker, exchange.links)
    return DrafterService(load, parts, exchange, drafted_on)


def _registry(
    load: Sequence[DrafterSpec], roots: Sequence[Path], resources: Resources, worker: DraftWorker
) -> Registry:
    """Make the registry, without drafters. It closes them on the worker's thread, and loads from
    below ``roots``, or the folders of ``load`` and their parents."""
    folders = [folder for spec in load for folder in spec.folders]
    allowed = [*roots, *folders] if roots else [f for path in folders for f in (path, path.parent)]

    def dispose(drafter: Drafter) -> None:
        worker.post(drafter.close)
        # The sequence of a slow round may still refer to the drafter: memory is returned to the
        # system after the last reference is gone.
        weakref.finalize(drafter, worker.post, trim).atexit = False

    return Registry(Loader(Roots(allowed), resources), dispose, partial(worker.run, lambda: None))
