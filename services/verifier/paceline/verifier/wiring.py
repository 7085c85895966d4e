"""What a verifier is made of: the loaded model, memory for KV, and the engine."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import torch

from paceline.convert import prepare
from paceline.decoder import (
    Decoder,
    GraphRunner,
    PackedModel,
    find_device,
    is_converted,
    read_converted,
    use_device,
)
from paceline.decoder.model import numerics_for
from paceline.decoder.products import use_library_without_splits
from paceline.service.phases import packing, phases
from paceline.service.runtime import available_memory, trim
from paceline.verifier.engine.engine import Engine
from paceline.verifier.engine.local import LocalSources
from paceline.verifier.kv.base import RESERVED_TOKENS, TREE_TOKENS, KvLayout
from paceline.verifier.kv.pool import PagePool
from paceline.verifier.kv.segment import SegmentMemory
from paceline.verifier.model import ModelInfo, read_model_info
from paceline.verifier.options import VerifierOptions
from paceline.verifier.rpc.messages import read_tree
from paceline.verifier.scheduler.scheduler import Scheduler, load_scheduler
from paceline.verifier.store import KvMemory

_log = logging.getLogger(__name__)

# How long a start waits for memory of a GPU that a process before it held.
_FREE_SECONDS, _FREE_POLL_SECONDS = 10.0, 0.25

_CONTEXTS = 0.05  # share of a GPU's memory that processes without tensors there may have

# Memory of a GPU beside weights and KV of which a start warns if there is less. Unit: bytes.
_REST = 2 << 30

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
            model = prepare(target, options.weights, options.lora, device, packing)
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


def load_target(model: PackedModel, options: VerifierOptions, device: torch.device) -> Decoder:
    """Build the decoder. Raises ``ValueError`` if the model or an option is not supported."""
    _check_numerics(options.numerics, device)
    config = model.description.config.with_kv(options.kv_cache_dtype)
    numerics = numerics_for(config, "auto" if options.numerics == "auto" else "portable")
    decoder = model.decoder(
        device, options.kv_cache_dtype, options.max_context, numerics, share=options.share_weights
    )
    if device.type == "cuda":
        fixed = options.numerics == "auto"
        use_library_without_splits(fixed=fixed)
        if fixed:
            decoder.fix_products()
        torch.cuda.empty_cache()  # KV gets what is left
    return decoder


def _check_numerics(numerics: str, device: torch.device) -> None:
    """Raise ``ValueError`` for numerics that a device does not have."""
    if device.type == "cpu":
        if numerics == "fast":
            raise ValueError(
                "numerics is 'fast', which is for GPUs; on a CPU auto is the fastest way"
            )
    elif numerics == "portable":
        raise ValueError(
            f"numerics is 'portable', and {device} has the bits of its kind of GPU and of its "
            "libraries: use auto, which gives the same text with any drafts, or --device cpu"
        )


def kv_memory(model: LoadedModel, options: VerifierOptions) -> KvSpace:
    """Take memory for KV. A context that does not fit shortens that of the model's description.
    Raises ``ValueError`` if no text fits, or the model's caches cannot lie in pages."""
    decoder, message = model.decoder, model.info.message
    config, device = decoder.config, decoder.device
    if config.delta_layers and options.paged_kv:
        raise ValueError(
            f"paged_kv is not supported for {config.model_type!r}, whose recurrent states lie "
            "beside segments"
        )
    layout = KvLayout.of(config)
    kv_bytes = options.kv_bytes
    if kv_bytes is None:
        kv_bytes = default_kv_bytes(device, options.gpu_memory, model.decoder.mapped_bytes)
    longest = _longest_text(layout, kv_bytes)
    warn_of_little_room(device, kv_bytes, longest, message.max_context)
    message.max_context = min(longest, message.max_context)
    max_sequences, max_prefixes = _cache_limits(options)
    why = why_no_graphs(decoder)
    if options.cuda_graphs == "on" and why:
        raise ValueError(f"cuda_graphs is 'on', and {why}: expected auto or off")
    if not options.paged_kv and device.type == "cpu":
        memory = SegmentMemory(layout, kv_bytes)
        return KvSpace(memory, None, None, max_sequences, max_prefixes)
    pool = PagePool(
        layout,
        device,
        kv_bytes=kv_bytes,
        max_sequences=max_sequences + max_prefixes,
        max_context=message.max_context,
    )
    graphs = None
    if options.cuda_graphs != "off" and not why:
        graphs = GraphRunner(decoder, pool, required=options.cuda_graphs == "on")
    return KvSpace(pool, pool, graphs, max_sequences, max_prefixes)


def why_no_graphs(decoder: Decoder) -> str:
    """Why steps of a model cannot be captured as CUDA graphs; empty if they can."""
    if decoder.device.type != "cuda":
        return "there is no GPU here"
    return ""


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
    tokens = slots // RESERVED_TOKENS * RESERVED_TOKENS - TREE_TOKENS
    if tokens <= 0:
        min_bytes = layout.capacity(1) * layout.token_bytes + layout.state_bytes
        raise ValueError(f"kv_bytes is {kv_bytes}, expected at least {min_bytes} for this model")
    return tokens


def warn_of_little_room(
    device: torch.device, kv_bytes: int, longest: int, max_context: int
) -> None:
    """Warn if KV has no room for the model's longest text, or a GPU for little else than KV.

    Args:
        device: That of the model, whose weights are loaded.
        kv_bytes: Memory for KV, which is not taken yet. Unit: bytes.
        longest: Longest text that fits. Unit: tokens.
        max_context: That of the model. Unit: tokens.
    """
    if device.type != "cuda":
        if longest < max_context:
            _log.warning("%d bytes of KV hold texts of %d tokens at most", kv_bytes, longest)
        return
    module = torch.get_device_module(device)
    weights, (_, total) = module.memory_reserved(device), module.mem_get_info(device)
    rest = total - weights - kv_bytes
    if longest < max_context or rest < _REST:
        _log.warning(
            "of the %.1f GB of %s weights take %.1f and KV %.1f, for texts of %d tokens at most "
            "(of the model: %d), which leaves %.1f for CUDA graphs and drafters: --gpu-memory and "
            "--kv-bytes change KV's share, --weights int8 takes less for weights",
            total / 1e9, device, weights / 1e9, kv_bytes / 1e9, longest, max_context, rest / 1e9,
        )  # fmt: skip


def default_kv_bytes(
    device: torch.device,
    share: float,
    mapped: int = 0,
    *,
    clock: Callable[[], float] = monotonic,
    sleep: Callable[[float], None] = sleep,
) -> int:
    """KV memory for a verifier that has loaded its weights on a device. Unit: bytes.

    On the CPU, half of what is free but the weights that are ``mapped`` from a file's cache. On
    another device what the weights leave of the share of its memory: a drafter finds the same rest
    whichever of both starts first. Of what is free a tenth is left in any case. A drafter may still
    map the KV of a verifier that has just ended: that memory is waited for.
    """
    if device.type == "cpu":
        return max(0, available_memory() - mapped) // 2
    module = torch.get_device_module(device)
    deadline = clock() + _FREE_SECONDS
    while True:
        free, total = module.mem_get_info(device)
        own = module.memory_reserved(device)
        wanted, most = int(share * total - own), int(0.9 * free)
        others = total - free - own
        if most >= wanted or others < _CONTEXTS * total:
            return max(0, min(wanted, most))
        if clock() >= deadline:
            break
        sleep(_FREE_POLL_SECONDS)
    _log.warning(
        "KV on %s gets %.1f GB, not %.1f: other processes hold %.1f of its %.1f GB, such as a "
        "drafter that maps the KV of an earlier verifier; end them, or set --gpu-memory or "
        "--kv-bytes",
        device, most / 1e9, wanted / 1e9, others / 1e9, total / 1e9,
    )  # fmt: skip
    return most
