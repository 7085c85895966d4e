"""The drafter service: registry, worker and servicers, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from paceline.drafter.kv import KvExchange, VerifierAccess
from paceline.drafter.methods import register_method
from paceline.drafter.methods.base import LoadError, Resources
from paceline.drafter.registry import Registry
from paceline.drafter.registry_servicer import DrafterRegistryServicer
from paceline.drafter.servicer import DrafterServicer
from paceline.drafter.spec import DrafterSpec, Roots
from paceline.drafter.worker import DraftWorker
from paceline.service import Service
from paceline.v1 import drafter_pb2_grpc

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from paceline.drafter.metrics import DrafterMetrics


class DrafterService:
    """Drafter and registry as one service (see :class:`paceline.service.Service`).

    Order of the end: no stream is left when :meth:`stop` is called; drafters are then closed on the
    worker's thread, after every sequence that was handed to it, and the thread ends.
    """

    service_names = ("paceline.v1.DrafterService", "paceline.v1.DrafterRegistryService")

    def __init__(
        self,
        load: Sequence[DrafterSpec],
        roots: Roots,
        resources: Resources,
        access: VerifierAccess,
        *,
        max_context: int,
        max_streams: int,
        metrics: CollectorRegistry | None = None,
    ) -> None:
        self._load = tuple(load)
        self._exchange = KvExchange(access)
        self._worker = DraftWorker()
        self._registry = Registry(
            roots, resources, lambda drafter: self._worker.post(drafter.close)
        )
        self._drafting = DrafterServicer(
            self._registry,
            self._worker,
            self._exchange,
            max_context=max_context,
            max_streams=max_streams,
            metrics=None if metrics is None else self._measured(metrics),
        )

    def _measured(self, metrics: CollectorRegistry) -> DrafterMetrics:
        # Here, because only a drafter that keeps metrics needs it.
        from paceline.drafter.metrics import DrafterMetrics

        return DrafterMetrics(metrics, self._registry, self._worker)

    def register(self, server: grpc.aio.Server) -> None:
        """Add both servicers."""
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self._drafting, server)
        drafter_pb2_grpc.add_DrafterRegistryServiceServicer_to_server(
            DrafterRegistryServicer(self._registry), server
        )

    async def start(self) -> None:
        """Load the drafters given at the start.

        Raises:
            LoadError: One of them cannot be loaded.
        """
        self._worker.start()
        for spec in self._load:
            await self._registry.load(spec)

    async def drain(self) -> None:
        """Refuse new streams, and return when those attached have ended."""
        self._drafting.gate.close()
        await self._drafting.gate.drained()

    async def stop(self) -> None:
        """Free all drafters, end the worker, and leave the verifiers."""
        await self._exchange.close()
        await self._registry.close()
        self._worker.stop()


def build_service(
    load: Sequence[DrafterSpec],
    *,
    roots: Sequence[Path] = (),
    device: str = "cpu",
    threads: int | None = None,
    max_context: int = 1 << 20,
    max_streams: int = 1024,
    access: VerifierAccess | None = None,
    metrics: CollectorRegistry | None = None,
    test_methods: Mapping[str, str] | None = None,
    allow_test_methods: bool = False,
) -> Service:
    """A drafter service, for :func:`paceline.service.run_server`.

    Args:
        load: Drafters to load at the start; the first is the default. May be empty: drafters can be
            loaded over gRPC too.
        roots: Folders below which LoadDrafter may load from. Empty: the folders in ``load`` and
            their parents.
        device: torch name of the device for methods with weights.
        threads: Threads of the math library for methods with weights; None: as it is set.
        max_context: Longest text a stream may have. Unit: tokens.
        max_streams: Most generations attached at once; further ones get RESOURCE_EXHAUSTED.
        metrics: Where its metrics are added; None: none are kept.
        access: How it shows itself to verifiers whose KV it reads; None: without token or TLS.
        test_methods: Methods from outside the package, name to ``module:Class``. They run code of
            the caller's choice, so they need ``allow_test_methods``. For tests only.
        allow_test_methods: Says that ``test_methods`` are wanted.

    Raises:
        LoadError: Test methods without leave, or under a name that is taken.
        OptionsError: The TLS authorities of ``access`` cannot be read.
        OSError: Another TLS file of it cannot be read.
    """
    if test_methods and not allow_test_methods:
        raise LoadError(
            "TEST_METHODS_NOT_ALLOWED",
            "methods from outside the package are for tests; say --allow-test-methods if this is "
            "one",
        )
    for name, path in (test_methods or {}).items():
        try:
            register_method(name, path)
        except ValueError as error:
            raise LoadError("INVALID_METHOD", str(error)) from error
    folders = [folder for spec in load for folder in spec.folders]
    allowed = [*roots, *folders] if roots else [f for each in folders for f in (each, each.parent)]
    return DrafterService(
        load,
        Roots(allowed),
        Resources(device=device, threads=threads),
        access or VerifierAccess(),
        max_context=max_context,
        max_streams=max_streams,
        metrics=metrics,
    )
