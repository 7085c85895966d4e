"""The drafter service: registry, worker and servicers."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from paceline.drafter.check import LoadCheck
from paceline.drafter.device import drafting_device, thread_setup
from paceline.drafter.kv.access import VerifierAccess
from paceline.drafter.kv.exchange import KvExchange
from paceline.drafter.methods.base import Drafter, Resources
from paceline.drafter.recordings import Recorder, read_recordings
from paceline.drafter.registry import Registry, StateFile
from paceline.drafter.registry.loader import Loader
from paceline.drafter.registry.servicer import DrafterRegistryServicer
from paceline.drafter.servicer import DrafterServicer
from paceline.drafter.spec import DrafterSpec, Roots
from paceline.drafter.telemetry import Telemetry
from paceline.drafter.worker import DraftWorker
from paceline.service import Service
from paceline.service.memory import trim
from paceline.telemetry.tracing import tracer
from paceline.v1 import drafter_pb2_grpc

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

RECORD_BYTES = 64 << 20
"""Default limit of recorded texts. Unit: bytes."""


class DrafterService:
    """Drafter and registry as one service (see :class:`paceline.service.Service`).

    :meth:`stop` is called when no stream is left. It closes the drafters on the worker's thread,
    after every sequence that was handed to it, and then ends the thread.
    """

    service_names = ("paceline.v1.DrafterService", "paceline.v1.DrafterRegistryService")

    def __init__(
        self,
        load: Sequence[DrafterSpec],
        registry: Registry,
        worker: DraftWorker,
        exchange: KvExchange,
        drafting: DrafterServicer,
        recorder: Recorder | None,
    ) -> None:
        self._load = list(load)
        self._registry = registry
        self._worker = worker
        self._exchange = exchange
        self._drafting = drafting
        self._recorder = recorder

    def register(self, server: grpc.aio.Server) -> None:
        """Add both servicers."""
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self._drafting, server)
        drafter_pb2_grpc.add_DrafterRegistryServiceServicer_to_server(
            DrafterRegistryServicer(self._registry, self._recorder), server
        )

    async def start(self) -> None:
        """Load the drafters of the command line, or restore the saved state.

        Raises:
            LoadError: A drafter of the command line cannot be loaded.
        """
        self._worker.start()
        await self._registry.start(self._load)

    async def fault(self) -> None:
        """Never returns: every failure is that of one drafter or one stream."""
        await asyncio.Future()

    async def drain(self) -> None:
        """Refuse new streams, and return when all attached ones have ended."""
        self._drafting.gate.close()
        await self._drafting.gate.drained()

    async def stop(self) -> None:
        """Free all drafters, end the worker, and disconnect from verifiers."""
        await self._exchange.close()
        await self._registry.close()
        self._worker.stop()
        if self._recorder is not None:
            await self._recorder.close()


def build_service(
    load: Sequence[DrafterSpec],
    *,
    roots: Sequence[Path] = (),
    device: str = "cpu",
    overlap: bool | None = None,
    threads: int | None = None,
    max_context: int = 1 << 20,
    max_streams: int = 1024,
    access: VerifierAccess | None = None,
    metrics: CollectorRegistry | None = None,
    state_dir: Path | None = None,
    recordings: Path | None = None,
    record: Path | None = None,
    record_bytes: int = RECORD_BYTES,
) -> Service:
    """Create a drafter service, for :func:`paceline.service.run_server`.

    Args:
        load: Drafters to load at start; the first is the default. May be empty: drafters can be
            loaded over gRPC too.
        roots: Folders below which LoadDrafter may load from. Empty: the folders in ``load`` and
            their parents.
        device: Device of methods with weights: auto, cpu, cuda or cuda:N
            (:func:`paceline.drafter.device.drafting_device`). KV on a GPU is mapped only by
            drafters on a GPU.
        overlap: Whether chains of ``lm`` and ``selfspec`` grow on while the verifier works. It pays
            where the drafter has a processor of its own. None: if ``device`` is a GPU.
        threads: Threads of the math library for methods with weights; None: its default.
        max_context: Longest text of a stream. Unit: tokens.
        max_streams: Maximum number of attached generations; further ones get RESOURCE_EXHAUSTED.
        access: Credentials for verifiers whose KV it reads; None: no token and no TLS.
        metrics: Registry of metrics to add its metrics to; None: no metrics.
        state_dir: Folder of this service's own for the state of the registry, created if missing.
            A start with the same ``load`` restores the state. None: the state is not saved.
        recordings: Texts for the load check of every version that reads no KV or hidden states
            (:func:`paceline.drafter.recordings.read_recordings`). None: versions are not checked.
        record: Folder of this service's own for the texts of its generations, for training
            (:class:`paceline.drafter.recordings.Recorder`). None: no text is recorded.
        record_bytes: Limit of ``record``. Unit: bytes.

    Raises:
        LoadError: A method is unknown or cannot be imported, or the recordings cannot be read.
        OptionsError: The TLS authorities of ``access`` cannot be read.
        OSError: Another TLS file of it cannot be read, or the folder of the state or of the texts
            cannot be created or used.
        ValueError: ``record_bytes`` is too small, or there is no such device.
    """
    # Drafts need not be the same on every machine.
    resources = Resources(device=drafting_device(device), threads=threads, numerics="auto")
    folders = [folder for spec in load for folder in spec.folders]
    allowed = [*roots, *folders] if roots else [f for each in folders for f in (each, each.parent)]
    if overlap is None:
        overlap = resources.device != "cpu"
    worker = DraftWorker(thread_setup(resources.device), overlap=overlap)

    def dispose(drafter: Drafter) -> None:
        worker.post(drafter.close)
        # The sequence of a slow round may still refer to the drafter: memory is returned to the
        # system after the last reference is gone.
        weakref.finalize(drafter, worker.post, trim).atexit = False

    registry = Registry(
        Loader(Roots(allowed), resources),
        dispose,
        check=LoadCheck(read_recordings(recordings), worker) if recordings is not None else None,
        state=StateFile(state_dir) if state_dir is not None else None,
    )
    exchange = KvExchange(access or VerifierAccess(), resources.device)
    recorder = Recorder(record, record_bytes) if record is not None else None
    drafter_metrics = None
    if metrics is not None:
        # Imported here, because prometheus_client is only needed for metrics.
        from paceline.drafter.metrics import DrafterMetrics

        drafter_metrics = DrafterMetrics(metrics, registry, worker, recorder)
    drafting = DrafterServicer(
        registry,
        worker,
        exchange,
        Telemetry(drafter_metrics, tracer()),
        recorder,
        max_context=max_context,
        max_streams=max_streams,
    )
    return DrafterService(load, registry, worker, exchange, drafting, recorder)
