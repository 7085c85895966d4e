"""What a verifier is made of: the loaded model, memory for KV, and the engine."""

from __future__ import annotations

import logging
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.convert import prepare
from paceline.decoder import Decoder, PackedModel, is_converted, read_converted
from paceline.decoder.model import numerics_for
from paceline.device import Device, device_of, find_device
from paceline.service.phases import packing, phases
from paceline.service.runtime import trim
from paceline.verifier.engine.engine import Engine
from paceline.verifier.engine.local import LocalSources
from paceline.verifier.kv.base import RESERVED_TOKENS, TREE_TOKENS, KvLayout
from paceline.verifier.kv.pool import PagePool
from paceline.verifier.kv.segment import SegmentMemory
from paceline.verifier.model import ModelInfo, read_model_info
from paceline.verifier.options import VerifierOptions
from paceline.verifier.rpc.exchange import read_tree
from paceline.verifier.scheduler.scheduler import Scheduler, load_scheduler
from paceline.verifier.store import KvMemory

if TYPE_CHECKING:
    from paceline.cuda.graphs import GraphRunner

_log = logging.getLogger(__name__)

_OTHER_FILES = 64  # open files that are left for connections


@dataclass(frozen=True)
class LoadedModel:
    """The target model, and what was made while it was loaded."""

    decoder: Decoder
    info: ModelInfo  # its description for clients
    threads: int  # threads of the math library that run it
    # With the times of its steps; None: every tree is verified as it comes.
    scheduler: Scheduler | None


@dataclass(frozen=True)
class KvSpace:
    """Memory for KV, and how many texts it serves."""

    memory: KvMemory
    pool: PagePool | None  # the memory, if KV lies in pages; else None
    graphs: GraphRunner | None  # CUDA graphs over the pages, on a device that has them
    max_sequences: int  # caches at once
    max_prefixes: int  # ended texts whose KV is kept


def load_model(target: Path, options: VerifierOptions) -> LoadedModel:
    """Load the target, publish its weights if they are shared, and profile its steps. Raises as
    :func:`paceline.verifier.build_service`."""
    threads = options.threads or torch.get_num_threads()
    # OpenMP keeps a team of workers for each thread that computes. A second team would
    # outnumber the cores, and its workers then sleep and wake at every operation, which doubles
    # the time of a step. So this thread gets none, and the loading thread ends with its own.
    torch.set_num_threads(1)
    device = find_device("cpu" if options.share_weights else options.device)

    def load() -> LoadedModel:
        phases.begin("reading the weights")
        if is_converted(target):
            model = read_converted(target, options.weights, options.lora)
        else:
            model = prepare(target, options.weights, options.lora, device.torch, packing)
        phases.begin("reading the weights")  # also after it was packed
        decoder = load_target(model, options, device)
        phases.begin("checking the model")
        info = read_model_info(
            model, decoder, max_context=options.max_context, lease_seconds=options.lease_seconds
        )
        trim()  # what is allocated next would keep what the checks have freed from being returned
        info.message.name = options.model_name or info.message.name
        info.message.local_sources.extend(options.sources)
        scheduler = None
        if options.schedule != "off":
            phases.begin("measuring the times of steps")
            again = options.schedule == "profile"
            scheduler = load_scheduler(
                decoder, info.message.max_context, options.node_budget, again=again
            )
        return LoadedModel(decoder, info, threads, scheduler)

    with ThreadPoolExecutor(1, initializer=_use, initargs=(threads, device)) as pool:
        return pool.submit(load).result()


def load_target(model: PackedModel, options: VerifierOptions, device: Device) -> Decoder:
    """Build the decoder. Raises ``ValueError`` if the model or an option is not supported."""
    device.check_numerics(options.numerics)
    config = model.description.config.with_kv(options.kv_cache_dtype)
    numerics = numerics_for(config, "auto" if options.numerics == "auto" else "portable")
    decoder = model.decoder(
        device.torch, options.kv_cache_dtype, options.max_context, numerics,
        share=options.share_weights,
    )  # fmt: skip
    device.prepare(decoder, options.numerics)
    return decoder


def kv_memory(model: LoadedModel, options: VerifierOptions) -> KvSpace:
    """Take memory for KV. A context that does not fit shortens the model description's.
    Raises ``ValueError`` if no text fits, or the model's caches cannot lie in pages."""
    decoder, message = model.decoder, model.info.message
    config, device = decoder.config, device_of(decoder.device)
    if config.delta_layers and options.paged_kv:
        raise ValueError(
            f"paged_kv is not supported for {config.model_type!r}, whose recurrent states lie "
            "beside segments"
        )
    layout = KvLayout.of(config)
    kv_bytes = options.kv_bytes
    if kv_bytes is None:
        kv_bytes = device.kv_bytes(options.gpu_memory, model.decoder.mapped_bytes)
    longest = _longest_text(layout, kv_bytes)
    device.warn_of_little_room(kv_bytes, longest, message.max_context)
    message.max_context = min(longest, message.max_context)
    max_sequences, max_prefixes = _cache_limits(options)
    pool, graphs = None, None
    if options.paged_kv or not device.packs:
        pool = PagePool(
            layout,
            device,
            kv_bytes=kv_bytes,
            max_sequences=max_sequences + max_prefixes,
            max_context=message.max_context,
        )
    if options.cuda_graphs != "off":
        graphs = device.step_graphs(decoder, pool, required=options.cuda_graphs == "on")
    memory = pool or SegmentMemory(layout, kv_bytes)
    return KvSpace(memory, pool, graphs, max_sequences, max_prefixes)


def engine(model: LoadedModel, kv: KvSpace, options: VerifierOptions) -> Engine:
    """Make the engine that runs the model's steps over the KV."""
    message = model.info.message
    return Engine(
        model.decoder,
        step_tokens=options.step_token_limit,
        prefill_tokens=options.prefill_token_limit,
        threads=model.threads,
        scheduler=model.scheduler,
        node_budget=options.node_budget,
        graphs=kv.graphs,
        max_prefixes=kv.max_prefixes,
        sources=LocalSources(options.sources),
        read_tree=lambda tree, job: read_tree(tree, message, job.text),
    )


def _use(threads: int, device: Device) -> None:
    """Prepare a thread to run the model."""
    torch.set_num_threads(threads)
    device.use()


def _cache_limits(options: VerifierOptions) -> tuple[int, int]:
    """Return the maximum number of caches, and of ended texts whose KV is kept.

    Each has two open files, its own and its mapping's, so the limit of open files bounds
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
    """Return the length of the longest text that fits, with a tree behind it, if no other one does.
    Raises ``ValueError``: none does."""
    slots = (kv_bytes - layout.state_bytes) // layout.token_bytes
    tokens = slots // RESERVED_TOKENS * RESERVED_TOKENS - TREE_TOKENS
    if tokens <= 0:
        min_bytes = layout.capacity(1) * layout.token_bytes + layout.state_bytes
        raise ValueError(f"kv_bytes is {kv_bytes}, expected at least {min_bytes} for this model")
    return tokens
