"""The verifier service: construction, start, drain and stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import grpc
import torch
from rich.console import Console
from rich.progress import Progress

from paceline.decoder import (
    Decoder,
    GraphRunner,
    PackedWeights,
    ParallelDecoder,
    open_model,
    publish,
    use_device,
)
from paceline.kernels import SamplingParams, choose_tokens
from paceline.service import Gate, limits
from paceline.service.runtime import available_memory, trim
from paceline.service.tasks import keep_running
from paceline.telemetry.tracing import tracer
from paceline.v1 import exchange_pb2_grpc, kv_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from paceline.verifier.engine.engine import Engine
from paceline.verifier.kv.base import BLOCK_TOKENS, TREE_TOKENS, KvLayout
from paceline.verifier.kv.pool import PagePool
from paceline.verifier.kv.segment import SegmentMemory
from paceline.verifier.model import ModelInfo, check_steps, read_model_info
from paceline.verifier.options import VerifierOptions
from paceline.verifier.ranks import load_target, meet_ranks, rank_device
from paceline.verifier.rpc.exchange import DraftExchangeServicer
from paceline.verifier.rpc.kv_exchange import KvExchangeServicer
from paceline.verifier.rpc.messages import read_tree
from paceline.verifier.rpc.servicer import VerifierServicer
from paceline.verifier.scheduler.scheduler import Scheduler, load_scheduler, save_scheduler
from paceline.verifier.store import CacheStore, KvMemory
from paceline.verifier.telemetry import FollowCounts, Telemetry

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from paceline.verifier.metrics import VerifierMetrics

_log = logging.getLogger(__name__)

_DRAIN_POLL_SECONDS = 0.02
_FREE_SECONDS, _FREE_POLL_SECONDS = 10.0, 0.25
"""How long a start waits for memory of a GPU that a process before it held."""
_CONTEXTS = 0.05
"""Share of a GPU's memory that processes without tensors there may have."""
_OTHER_FILES = 64
"""Open files that are left for connections."""


class VerifierService:
    """Target model, KV caches and engine behind the verifier's RPCs (paceline.service.Service).

    Attributes:
        store: The caches.
        engine: The engine.
    """

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
    ) -> None:
        """Load the model; see :func:`build_service`."""
        threads = options.threads or torch.get_num_threads()
        if not options.threads and "RANK" not in os.environ:
            threads = max(1, threads // options.tensor_parallel)
        # OpenMP keeps a team of workers for each thread that computes. A second team would
        # outnumber the cores, and its workers then sleep and wake at every operation, which doubles
        # the time of a step. So this thread gets none, and the loading thread ends with its own.
        torch.set_num_threads(1)
        device = rank_device(options)
        self._ranks = meet_ranks(target, options, device, threads)
        self._weights: int | None = None
        self._scheduler: Scheduler | None = None
        try:
            with ThreadPoolExecutor(1, initializer=_use, initargs=(threads, device)) as pool:
                decoder, model = pool.submit(self._load, target, options, device).result()
        except BaseException:
            if self._ranks is not None:
                self._ranks.kill()
            raise
        self._decoder = decoder
        followers = decoder.followers if isinstance(decoder, ParallelDecoder) else None
        self._info, self._model, self._threads = model, model.message, threads
        config = decoder.config
        if config.delta_layers and options.paged_kv:
            raise ValueError(
                f"paged_kv is not supported for {config.model_type!r}, whose recurrent states lie "
                "beside segments"
            )
        layout = KvLayout.of(config)
        kv_bytes = options.kv_bytes
        if kv_bytes is None:
            kv_bytes = _default_kv_bytes(decoder.device, options.gpu_memory)
        longest = _longest_text(layout, kv_bytes)
        if longest < model.message.max_context:
            _log.warning("%d bytes of KV hold texts of %d tokens at most", kv_bytes, longest)
            model.message.max_context = longest
        max_sequences, max_prefixes = _cache_limits(options)
        self._pool: PagePool | None = None
        memory: KvMemory
        self._graphs: GraphRunner | None = None
        if options.paged_kv or decoder.device.type != "cpu":
            memory = self._pool = PagePool(
                layout,
                decoder.device,
                kv_bytes=kv_bytes,
                max_sequences=max_sequences + max_prefixes,
                max_context=model.message.max_context,
                followers=followers,
            )
            graphs = decoder.device.type == "cuda" and find_spec("triton") is not None
            if graphs and followers is None and options.cuda_graphs != "off":
                required = options.cuda_graphs == "on"
                self._graphs = GraphRunner(decoder, self._pool, required=required)
        else:
            memory = SegmentMemory(layout, kv_bytes, followers)
        self.engine = Engine(
            decoder,
            step_tokens=options.step_token_limit,
            prefill_tokens=options.prefill_token_limit,
            threads=threads,
            scheduler=self._scheduler,
            node_budget=options.node_budget,
            graphs=self._graphs,
            max_prefixes=max_prefixes,
            read_tree=lambda tree, job: read_tree(tree, model.message, job.sequence),
        )
        self.store = CacheStore(
            memory,
            self.engine.release,
            max_sequences=max_sequences,
            lease_seconds=options.lease_seconds,
            prefixes=self.engine.prefixes,
        )
        self._gate = Gate()
        self._follow_counts = FollowCounts()
        self._exchange = DraftExchangeServicer(
            model.message,
            self.engine,
            self.store,
            options.draft_socket,
            self._weights,
            needs_token=needs_token,
        )
        self._exchange.on_tapped = self._capture_taps
        self._captures: set[asyncio.Task[None]] = set()
        kept = None if metrics is None else self._metrics(metrics, model)
        telemetry = Telemetry(kept, tracer(), options.trace_rounds)
        self._servicer = VerifierServicer(
            model, self.store, self.engine, self._gate, self._exchange, telemetry
        )
        self._sweeper: asyncio.Task[None] | None = None

    def _load(
        self, target: Path, options: VerifierOptions, device: torch.device
    ) -> tuple[Decoder, ModelInfo]:
        """Load the model, publish its weights if they are shared, and profile its steps."""
        source = open_model(target, options.lora)
        decoder = load_target(source, options, device, self._ranks)
        model = read_model_info(
            source,
            decoder,
            max_context=options.max_context,
            lease_seconds=options.lease_seconds,
        )
        trim()  # what is allocated next would keep what the checks have freed from being returned
        model.message.name = options.model_name or model.message.name
        if options.share_weights:
            self._weights = publish(decoder.large_tensors())
            packed = PackedWeights(self._weights)
            decoder = load_target(source, options, device, shared=packed)
        if options.schedule != "off":
            again = options.schedule == "profile"
            self._scheduler = load_scheduler(
                decoder, model.message.max_context, options.node_budget, again=again
            )
        return decoder, model

    def _metrics(self, registry: CollectorRegistry, model: ModelInfo) -> VerifierMetrics:
        # Imported here, since only a verifier with metrics needs it.
        from paceline.verifier.metrics import VerifierMetrics

        metrics = VerifierMetrics(
            registry,
            model.message,
            self.store,
            self.engine,
            self._follow_counts,
            self._exchange.joined,
            self._graphs,
        )
        self.engine.on_step = metrics.step
        self.store.on_release = metrics.released
        return metrics

    def joined(self) -> list[verifier_pb2.JoinedService]:
        """The drafter services that have joined, in order."""
        return self._exchange.joined()

    @property
    def message_bytes(self) -> dict[str, int]:
        """Longest requests: of CreateCache a text of the whole context. Unit: bytes."""
        text = limits.TOKEN_BYTES * self._model.max_context
        return {
            "/paceline.v1.VerifierService/CreateCache": limits.MESSAGE_BYTES + text,
            "/paceline.v1.DraftExchangeService/Join": limits.FRAME_BYTES,
        }

    def facts(self) -> dict[str, object]:
        """The model and its format, the device, and the room for texts, for the log."""
        model, device = self._model, self._decoder.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        return {
            "model": model.name,
            "weights": model.weights,
            "device": name,
            "threads": self._threads,
            "kv_bytes": self.store.memory.limit_bytes,
            "kv_cache_dtype": model.kv_cache_dtype,
            "max_context": model.max_context,
            "max_sequences": self.store.max_sequences,
            "drafters": [each.default_drafter for each in self._exchange.joined()],
        }

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicers to a server."""
        # The generated functions have no annotations.
        add_verifier: Any = verifier_pb2_grpc.add_VerifierServiceServicer_to_server
        add_kv_exchange: Any = kv_pb2_grpc.add_KvExchangeServiceServicer_to_server
        add_verifier(self._servicer, server)
        add_exchange: Any = exchange_pb2_grpc.add_DraftExchangeServiceServicer_to_server
        add_exchange(self._exchange, server)
        add_kv_exchange(KvExchangeServicer(self.store, self._follow_counts), server)

    async def start(self) -> None:
        """Start the engine, the socket for drafter services and lease sweeps."""
        gc.collect()
        trim()  # what was used to load the model
        gc.freeze()  # the model's objects are never freed: collections skip them
        gc.set_threshold(20_000)  # a step creates hundreds of small objects and keeps few
        self.engine.start()
        if self._graphs is not None:
            await self._warm_up(self._graphs)
        if self._decoder.device.type == "cuda":
            assert self._pool is not None
            check = partial(check_steps, self._decoder, self._graphs, self._pool)
            self._info.set_invariance(await self.engine.between_steps(check), self._decoder)
        await self._exchange.start()
        self._sweeper = keep_running("the sweep of leases", self._sweep_leases)

    async def _warm_up(self, graphs: GraphRunner) -> None:
        """Compile kernels and capture graphs on the engine thread, with a progress bar."""
        steps = graphs.warm_up()
        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("CUDA graphs")
            while (found := await self.engine.between_steps(lambda: next(steps, None))) is not None:
                bar.update(task, completed=found[0], total=found[1])
        row = torch.zeros(1, self._decoder.config.vocab_size, dtype=self._decoder.config.dtype)
        params = SamplingParams(top_k=1)  # all kernels
        choose = partial(choose_tokens, row.to(self._decoder.device), [params], [0])
        await self.engine.between_steps(choose)
        failed = f"; {graphs.failed} could not be captured" if graphs.failed else ""
        _log.info("CUDA graphs: %d%s", len(graphs), failed)

    def _capture_taps(self, layers: tuple[int, ...]) -> None:
        """Capture the graphs that return hidden states, before a step of a generation needs one."""
        if self._graphs is not None:
            task = asyncio.create_task(self._capture_between_steps(self._graphs, layers))
            self._captures.add(task)
            task.add_done_callback(self._captures.discard)

    async def _capture_between_steps(self, graphs: GraphRunner, layers: tuple[int, ...]) -> None:
        steps = graphs.warm_up(layers)
        try:
            while await self.engine.between_steps(lambda: next(steps, None)) is not None:
                pass
        except Exception:
            _log.exception("graphs with hidden states of layers %s are missing", layers)

    async def fault(self) -> None:
        """Wait until the device is lost. Raises ``DeviceLost``: it is."""
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
        self._exchange.end()

    async def stop(self) -> None:
        """Stop the engine and free every cache. Raises ``AssertionError``: memory leaked: see
        ``CacheStore.check_integrity``."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper
        await self._exchange.stop()
        for task in self._captures:
            task.cancel()
        await asyncio.gather(*self._captures, return_exceptions=True)
        await self.engine.stop()
        if self._ranks is not None:
            await asyncio.to_thread(self._ranks.stop)
        if self._scheduler is not None:
            save_scheduler(self._scheduler, self._decoder)
        if self._weights is not None:
            os.close(self._weights)
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


def _use(threads: int, device: torch.device) -> None:
    """Prepare a thread to run the model."""
    torch.set_num_threads(threads)
    use_device(device)


def _cache_limits(options: VerifierOptions) -> tuple[int, int]:
    """Maximum number of caches, and of ended texts whose KV is kept.

    Each has two open files, its own and that of its mapping, so the limit of open files bounds
    both. What is open now, and some for connections, is left out.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = (limit - len(os.listdir("/proc/self/fd")) - _OTHER_FILES) // 2
    max_sequences = min(options.max_sequences, max(1, room - room // 2))
    if max_sequences < options.max_sequences:
        _log.warning(
            "%d open files allow %d caches at once, not %d; raise `ulimit -n`",
            limit,
            max_sequences,
            options.max_sequences,
        )
    kept = options.max_sequences if options.prefix_caching else 0
    return max_sequences, max(0, min(kept, room - max_sequences))


def _longest_text(layout: KvLayout, kv_bytes: int) -> int:
    """Tokens of the longest text that fits, with a tree behind it, if no other one does. Raises
    ``ValueError``: none does."""
    slots = (kv_bytes - layout.state_bytes) // layout.token_bytes
    tokens = slots // BLOCK_TOKENS * BLOCK_TOKENS - TREE_TOKENS
    if tokens <= 0:
        min_bytes = layout.capacity(1) * layout.token_bytes + layout.state_bytes
        raise ValueError(f"kv_bytes is {kv_bytes}, expected at least {min_bytes} for this model")
    return tokens


def _default_kv_bytes(device: torch.device, share: float) -> int:
    """KV memory for a verifier that has loaded its weights on a device. Unit: bytes.

    Half of what is free on the CPU. On another device what the weights leave of the share of its
    memory: a drafter finds the same rest whichever of both starts first. Of what is free a tenth is
    left in any case. A drafter may still map the KV of a verifier that has just ended: that memory
    is waited for.
    """
    if device.type == "cpu":
        return available_memory() // 2
    module = torch.get_device_module(device)
    deadline = monotonic() + _FREE_SECONDS
    while True:
        free, total = module.mem_get_info(device)
        own = module.memory_reserved(device)
        wanted, most = int(share * total - own), int(0.9 * free)
        others = total - free - own
        if most >= wanted or others < _CONTEXTS * total:
            return max(0, min(wanted, most))
        if monotonic() >= deadline:
            break
        sleep(_FREE_POLL_SECONDS)
    _log.warning(
        "KV on %s gets %.1f GB, not %.1f: other processes hold %.1f of its %.1f GB, such as a "
        "drafter that maps the KV of an earlier verifier; end them, or set --gpu-memory or "
        "--kv-bytes",
        device, most / 1e9, wanted / 1e9, others / 1e9, total / 1e9,
    )  # fmt: skip
    return most


def build_service(
    target: Path,
    *,
    metrics: CollectorRegistry | None = None,
    needs_token: bool = False,
    **options: Any,
) -> VerifierService:
    """Load a model and build a verifier for ``paceline.service.run_server``.

    Args:
        target: Hugging Face folder or GGUF file of the target model.
        metrics: Registry for its metrics; None: it keeps none.
        needs_token: Whether the server requires a token of its callers.
        options: Fields of :class:`VerifierOptions`.

    Raises:
        ValueError: An option is out of range, or the model is not supported.
        FileNotFoundError: ``target`` does not exist, or is a folder without a config.json.
        TypeError: An option is unknown.
    """
    chosen = VerifierOptions(**options)
    return VerifierService(target, chosen, metrics, needs_token=needs_token)
