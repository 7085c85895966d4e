"""The drafter service: registry, worker and servicers, put together."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from paceline.drafter.check import LoadCheck
from paceline.drafter.device import drafting_device, thread_setup
from paceline.drafter.kv import KvExchange, VerifierAccess
from paceline.drafter.methods.base import Drafter, Resources
from paceline.drafter.recordings import Recorder, Recording, read_recordings
from paceline.drafter.registry import Registry, StateFile
from paceline.drafter.registry.keeper import Keeper
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
"""Room for recorded texts where none is said. Unit: bytes."""


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
        state: StateFile | None = None,
        recordings: Sequence[Recording] = (),
        recorder: Recorder | None = None,
    ) -> None:
        self._load = list(load)
        self._state = state
        self._recorder = recorder
        self._exchange = KvExchange(access, resources.device)
        self._worker = DraftWorker(thread_setup(resources.device))
        self._registry = Registry(
            Loader(roots, resources),
            self._dispose,
            check=LoadCheck(recordings, self._worker) if recordings else None,
            keeper=Keeper(state) if state is not None else None,
        )
        self._drafting = DrafterServicer(
            self._registry,
            self._worker,
            self._exchange,
            max_context=max_context,
            max_streams=max_streams,
            telemetry=self._telemetry(metrics),
            recorder=recorder,
        )

    def _dispose(self, drafter: Drafter) -> None:
        self._worker.post(drafter.close)
        # Its weights go with the last that refers to it, such as the sequence of a slow round.
        weakref.finalize(drafter, self._worker.post, trim).atexit = False

    def _telemetry(self, registry: CollectorRegistry | None) -> Telemetry | None:
        spans = tracer()
        metrics = None
        if registry is not None:
            # Here, because only a drafter that keeps metrics needs it.
            from paceline.drafter.metrics import DrafterMetrics

            metrics = DrafterMetrics(registry, self._registry, self._worker, self._recorder)
        return Telemetry(metrics, spans) if metrics is not None or spans is not None else None

    def register(self, server: grpc.aio.Server) -> None:
        """Add both servicers."""
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self._drafting, server)
        drafter_pb2_grpc.add_DrafterRegistryServiceServicer_to_server(
            DrafterRegistryServicer(self._registry, self._recorder), server
        )

    async def start(self) -> None:
        """Load the drafters given at the start, or those that were there before a restart.

        Raises:
            LoadError: One of those given cannot be loaded.
        """
        self._worker.start()
        state = self._state.read() if self._state is not None else None
        await self._registry.begin(self._load, state)

    async def fault(self) -> None:
        """Never returns: whatever fails, fails one drafter or one stream."""
        await asyncio.Future()

    async def drain(self) -> None:
        """Refuse new streams, and return when those attached have ended."""
        self._drafting.gate.close()
        await self._drafting.gate.drained()

    async def stop(self) -> None:
        """Free all drafters, end the worker, and leave the verifiers."""
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
    """A drafter service, for :func:`paceline.service.run_server`.

    Args:
        load: Drafters to load at the start; the first is the default. May be empty: drafters can be
            loaded over gRPC too.
        roots: Folders below which LoadDrafter may load from. Empty: the folders in ``load`` and
            their parents.
        device: Where methods with weights compute: auto, cpu, cuda or cuda:N
            (:func:`paceline.drafter.device.drafting_device`). KV on a GPU is mapped only by
            drafters on one.
        threads: Threads of the math library for methods with weights; None: as it is set.
        max_context: Longest text a stream may have. Unit: tokens.
        max_streams: Most generations attached at once; further ones get RESOURCE_EXHAUSTED.
        metrics: Where its metrics are added; None: none are kept.
        access: How it shows itself to verifiers whose KV it reads; None: without token or TLS.
        state_dir: Folder of this service's own where it keeps what is loaded over a restart; made
            if need be. A start with the same ``load`` takes that up. None: each start is a new one.
        recordings: Texts that every version without needs for KV drafts along before it is listed
            (:func:`paceline.drafter.recordings.read_recordings`). None: versions are not checked.
        record: Folder of this service's own where the texts of its generations are kept, to learn
            from (:class:`paceline.drafter.recordings.Recorder`). None: no text is kept.
        record_bytes: Most room they may take there. Unit: bytes.

    Raises:
        LoadError: A method is unknown or cannot be imported, or the recordings cannot be read.
        OptionsError: The TLS authorities of ``access`` cannot be read.
        OSError: Another TLS file of it cannot be read, or the folder of the state or of the texts
            cannot be made or used.
        ValueError: There is too little room for texts, or no such device.
    """
    folders = [folder for spec in load for folder in spec.folders]
    allowed = [*roots, *folders] if roots else [f for each in folders for f in (each, each.parent)]
    return DrafterService(
        load,
        Roots(allowed),
        Resources(device=drafting_device(device), threads=threads),
        access or VerifierAccess(),
        max_context=max_context,
        max_streams=max_streams,
        metrics=metrics,
        state=StateFile(state_dir) if state_dir is not None else None,
        recordings=read_recordings(recordings) if recordings is not None else (),
        recorder=Recorder(record, record_bytes) if record is not None else None,
    )
