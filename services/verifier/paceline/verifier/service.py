"""The verifier service: construction, start, drain and stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import torch

from paceline.decoder import BatchInvariance
from paceline.kernels import SamplingRules, choose_tokens
from paceline.service import Gate, limits
from paceline.service.phases import phases
from paceline.service.runtime import trim
from paceline.service.tasks import keep_running
from paceline.telemetry.tracing import tracer
from paceline.v1 import exchange_pb2_grpc, kv_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from paceline.verifier.model import ModelInfo
from paceline.verifier.options import VerifierOptions
from paceline.verifier.rpc.exchange import DraftExchangeServicer
from paceline.verifier.rpc.kv_exchange import KvExchangeServicer
from paceline.verifier.rpc.servicer import VerifierServicer
from paceline.verifier.scheduler.scheduler import save_scheduler
from paceline.verifier.store import CacheStore
from paceline.verifier.telemetry import Telemetry
from paceline.verifier.wiring import engine, kv_memory, load_model

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from paceline.cuda.graphs import GraphRunner
    from paceline.verifier.metrics import VerifierMetrics

_log = logging.getLogger(__name__)

_DRAIN_POLL_SECONDS = 0.02


class VerifierService:
    """Target model, KV caches and engine behind the verifier's RPCs (paceline.service.Service)."""

    service_names = (
        "paceline.v1.VerifierService",
        "paceline.v1.KvExchangeService",
        "paceline.v1.DraftExchangeService",
    )

    def __init__(
        self,
        target: Path,
        options: VerifierOptions,
        metrics: CollectorRegistry | None = None,
        *,
        needs_token: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the model; see :func:`build_service`."""
        loaded = self._loaded = load_model(target, options)
        self._decoder, self._info = loaded.decoder, loaded.info
        model = self._model = loaded.info.message
        phases.begin("taking memory")
        kv = kv_memory(loaded, options)
        self._pool, self._graphs = kv.pool, kv.graphs
        self.engine = engine(loaded, kv, options)
        self.store = CacheStore(  # the caches
            kv.memory,
            self.engine.release,
            max_sequences=kv.max_sequences,
            lease_seconds=options.lease_seconds,
            prefixes=self.engine.prefixes,
            clock=clock,
        )
        self._gate = Gate()
        self.exchange = DraftExchangeServicer(  # the drafter services that have joined
            model, self.engine, self.store, options.draft_socket, needs_token=needs_token
        )
        self.exchange.on_tapped = self._capture_taps
        self._captures: set[asyncio.Task[None]] = set()
        kept = None if metrics is None else self._metrics(metrics, loaded.info)
        telemetry = Telemetry(kept, tracer(), options.trace_rounds)
        self._servicer = VerifierServicer(
            loaded.info, self.store, self.engine, self._gate, self.exchange, telemetry
        )
        self._sweeper: asyncio.Task[None] | None = None

    def _metrics(self, registry: CollectorRegistry, model: ModelInfo) -> VerifierMetrics:
        # Imported here, since only a verifier with metrics needs it.
        from paceline.verifier.metrics import VerifierMetrics

        metrics = VerifierMetrics(
            registry,
            model.message,
            self.store,
            self.engine,
            self.exchange.joined,
            self._graphs,
        )
        self.engine.on_step = metrics.step
        self.store.on_release = metrics.released
        return metrics

    def joined(self) -> list[verifier_pb2.JoinedService]:
        """Return the drafter services that have joined, in order."""
        return self.exchange.joined()

    @property
    def message_bytes(self) -> dict[str, int]:
        """Longest requests: of CreateCache a text of the whole context. Unit: bytes."""
        text = limits.TOKEN_BYTES * self._model.max_context
        return {
            "/paceline.v1.VerifierService/CreateCache": limits.MESSAGE_BYTES + text,
            "/paceline.v1.DraftExchangeService/Join": limits.FRAME_BYTES,
        }

    def facts(self) -> dict[str, object]:
        """Return the model and its format, the device, and the room for texts, for the log."""
        model = self._model
        return {
            "model": model.name,
            "weights": model.weights,
            "device": self.engine.device.product_name,
            "threads": self._loaded.threads,
            "kv_bytes": self.store.memory.limit_bytes,
            "kv_cache_dtype": model.kv_cache_dtype,
            "max_context": model.max_context,
            "max_sequences": self.store.max_sequences,
            "drafters": [service.default_drafter for service in self.exchange.joined()],
        }

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicers to a server."""
        # The generated functions have no annotations.
        add_verifier: Any = verifier_pb2_grpc.add_VerifierServiceServicer_to_server
        add_kv_exchange: Any = kv_pb2_grpc.add_KvExchangeServiceServicer_to_server
        add_verifier(self._servicer, server)
        add_exchange: Any = exchange_pb2_grpc.add_DraftExchangeServiceServicer_to_server
        add_exchange(self.exchange, server)
        add_kv_exchange(KvExchangeServicer(self.store), server)

    async def start(self) -> None:
        """Start the engine, the socket for drafter services and lease sweeps."""
        gc.collect()
        trim()  # what was used to load the model
        gc.freeze()  # the model's objects are never freed: collections skip them
        gc.set_threshold(20_000)  # a step creates hundreds of small objects and keeps few
        self.engine.start()
        if self._graphs is not None:
            await self._warm_up(self._graphs)
        if self.engine.device.graphs:
            from paceline.verifier.served import check_steps

            assert self._pool is not None
            check = partial(check_steps, self._decoder, self._graphs, self._pool)
            self._info.set_invariance(await self.engine.between_steps(check), self._decoder)
        await self.exchange.start()
        self._sweeper = keep_running("the sweep of leases", self._sweep_leases)

    async def _warm_up(self, graphs: GraphRunner) -> None:
        """Compile kernels and capture graphs on the engine thread."""
        steps = graphs.warm_up()
        row = torch.zeros(1, self._decoder.config.vocab_size, dtype=self._decoder.config.dtype)
        params = SamplingRules(top_k=1)  # all kernels
        choose = partial(choose_tokens, row.to(self._decoder.device), [params], [0])
        phases.begin("compiling kernels")
        await self.engine.between_steps(partial(graphs.compile, [choose], phases.reached))
        phases.begin("capturing CUDA graphs")
        while (counts := await self.engine.between_steps(lambda: next(steps, None))) is not None:
            phases.reached(*counts)
        await self.engine.between_steps(choose)
        graphs.report()

    def _capture_taps(self, layers: tuple[int, ...]) -> None:
        """Capture the graphs that return hidden states, before a step of a generation needs one."""
        if self._graphs is not None:
            task = asyncio.create_task(self._capture_between_steps(self._graphs, layers))
            self._captures.add(task)
            task.add_done_callback(self._captures.discard)

    async def _capture_between_steps(self, graphs: GraphRunner, layers: tuple[int, ...]) -> None:
        before, steps = len(graphs), graphs.warm_up(layers)
        try:
            while await self.engine.between_steps(lambda: next(steps, None)) is not None:
                pass
            if len(graphs) > before and self._model.batch_invariant:
                await self._check_states(graphs, layers)
        except Exception:
            _log.exception(
                "graphs with hidden states of layers %s are missing, or not checked", layers
            )

    async def _check_states(self, graphs: GraphRunner, layers: tuple[int, ...]) -> None:
        """Check new graphs one by one, so that no text waits for all of them. Raises
        ``OutOfMemory``: other texts have all memory."""
        from paceline.verifier.served import check_states

        assert self._pool is not None
        cache, run = self._pool.allocate(graphs.shapes[-1], None), self.engine.between_steps
        try:
            await run(partial(cache.reserve, cache.capacity))
            for rows in graphs.shapes:
                check = partial(check_states, self._decoder, graphs, cache, layers, rows)
                if differs := await run(check):
                    self._info.set_invariance(BatchInvariance(False, differs), self._decoder)
                    break
        finally:
            await run(cache.close)

    async def fault(self) -> None:
        """Wait until the device is lost. Raises ``DeviceLost`` if it is."""
        await self.engine.lost()

    async def drain(self) -> None:
        """Refuse new caches (UNAVAILABLE, DRAINING); return when every generation has ended.

        One that nobody reads any more is released.
        """
        self._gate.close()
        await self._gate.drained()
        while self.store.unfinished:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)  # the engine thread ends them
            await self.store.release_abandoned()
        self.exchange.end()

    async def stop(self) -> None:
        """Stop the engine and free every cache. Raises ``AssertionError``: memory leaked: see
        ``CacheStore.check_integrity``."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper
        await self.exchange.stop()
        for task in self._captures:
            task.cancel()
        await asyncio.gather(*self._captures, return_exceptions=True)
        await self.engine.stop()
        loaded = self._loaded
        if loaded.scheduler is not None:
            save_scheduler(loaded.scheduler, loaded.decoder)
        gc.unfreeze()
        await self.store.wait_released()
        try:
            self.store.check_integrity()
        finally:
            await self.store.close()
        self.store.check_integrity()
        if self._pool is not None:
            self._pool.check_integrity()
            self._pool.close()

    async def check_integrity(self) -> None:
        """Check that no memory, handle or segment leaked. Nothing may be running. Raises
        ``AssertionError``: something leaked; the message names it."""
        await self.engine.between_steps(self.store.check_integrity)

    async def _sweep_leases(self) -> None:
        while True:
            await asyncio.sleep(min(self.store.lease_seconds, limits.UNUSED_SECONDS) / 6)
            await self.store.sweep()


def build_service(
    target: Path,
    *,
    metrics: CollectorRegistry | None = None,
    needs_token: bool = False,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> VerifierService:
    """Load a model and build a verifier for ``paceline.service.run_server``.

    Args:
        target: Hugging Face folder or GGUF file of the target model.
        metrics: Registry for its metrics; None if it keeps none.
        needs_token: Whether the server requires a token of its callers.
        clock: That of leases. Unit: seconds.
        options: Fields of :class:`VerifierOptions`.

    Raises:
        ValueError: An option is out of range, or the model is not supported.
        FileNotFoundError: ``target`` does not exist, or is a folder without a config.json.
        TypeError: An option is unknown.
    """
    chosen = VerifierOptions(**options)
    return VerifierService(target, chosen, metrics, needs_token=needs_token, clock=clock)
