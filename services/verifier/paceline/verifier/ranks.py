"""The processes of a tensor-parallel verifier: rank 0 starts the others, or torchrun starts all."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import sys
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed.rendezvous import rendezvous

from paceline.decoder import (
    Decoder,
    ModelSource,
    PackedWeights,
    ParallelDecoder,
    Ranks,
    check_split,
    end_all,
    find_device,
    open_model,
    run_rank,
    use_device,
)
from paceline.decoder.model import numerics_for
from paceline.decoder.products import use_library_without_splits
from paceline.service import configure_logging
from paceline.verifier.options import VerifierOptions

_log = logging.getLogger(__name__)

_STORE = "PACELINE_RANKS"
"""Variable with the file where the ranks of one machine meet."""


def rank_device(options: VerifierOptions) -> torch.device:
    """Device of this rank: each rank of a machine has its own GPU. Raises ``ValueError``: there is
    no such device."""
    name = "cpu" if options.share_weights else options.device
    if options.tensor_parallel > 1 and (
        name == "cuda" or (name == "auto" and find_device(name).type == "cuda")
    ):
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    return find_device(name)


def meet_ranks(
    target: Path, options: VerifierOptions, device: torch.device, threads: int
) -> Ranks | None:
    """Meet the other ranks of a verifier; rank 0 starts them, unless torchrun has.

    Args:
        target: The model.
        options: The verifier's.
        device: Device of this rank.
        threads: Threads of each other rank.

    Returns:
        The ranks; None: there is one.

    Raises:
        RanksDiffer: Their weights or options differ.
        RanksLost: One did not come.
        UnsupportedModelError: The model cannot be shared by so many.
        ValueError: torchrun has started another number of processes.
    """
    size = options.tensor_parallel
    if size == 1:
        return None
    source = open_model(target, options.lora)
    check_split(source.config(options.weights), size)
    facts = _facts(source, options)
    file = os.environ.get(_STORE)
    if file is not None:
        store: Store = FileStore(file, size)
        return Ranks(store, int(os.environ["RANK"]), size, device, facts, local=True)
    if "RANK" in os.environ:
        store, rank, started = next(rendezvous("env://"))
        if started != size:
            raise ValueError(
                f"tensor_parallel is {size}, and torchrun has started {started} processes: give "
                "both the same number"
            )
        return Ranks(store, rank, size, device, facts)
    folder = TemporaryDirectory(prefix="paceline-ranks-")
    file = str(Path(folder.name, "store"))
    others = [_start(target, options, file, rank, threads) for rank in range(1, size)]
    atexit.register(end_all, others, seconds=0)  # before multiprocessing waits for them
    store = FileStore(file, size)
    try:
        return Ranks(store, 0, size, device, facts, local=True, children=others, folder=folder)
    except BaseException:
        end_all(others, seconds=0)
        raise


def load_target(
    source: ModelSource,
    options: VerifierOptions,
    device: torch.device,
    ranks: Ranks | None = None,
    shared: PackedWeights | None = None,
) -> Decoder:
    """Load the model, or this rank's part of it. Raises ``ValueError``: the model or an option is
    not supported; ``RanksLost``: another rank could not load its part."""
    _check_numerics(options.numerics, device)
    kind = Decoder if ranks is None else ParallelDecoder
    decoder = kind.load(
        source,
        options.weights,
        device,
        shared,
        options.kv_cache_dtype,
        ranks,
        options.max_context,
        _choose_numerics(source, options),
    )
    if device.type == "cuda":
        fixed = options.numerics == "auto"
        use_library_without_splits(fixed=fixed)
        if fixed:
            decoder.fix_products()
        torch.cuda.empty_cache()  # KV gets what is left
    if ranks is not None:
        ranks.wait()
    return decoder


def run_other_rank(target: Path, options: VerifierOptions) -> None:
    """Be another rank than 0, until rank 0 ends. Raises ``ValueError``: the model or an option is
    not supported; ``RanksDiffer``: weights or options of the ranks differ; ``RanksLost``: another
    rank has ended."""
    for each in (signal.SIGTERM, signal.SIGINT):  # rank 0 drains, then it ends this one
        signal.signal(each, signal.SIG_IGN)
    device = rank_device(options)
    threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    use_device(device)
    ranks = meet_ranks(target, options, device, threads)
    assert ranks is not None
    decoder = load_target(open_model(target, options.lora), options, device, ranks)
    assert isinstance(decoder, ParallelDecoder)
    _log.info(
        "this rank follows rank 0",
        extra={"rank": ranks.rank, "ranks": ranks.size, "device": str(device)},
    )
    run_rank(decoder, ranks)


def _choose_numerics(source: ModelSource, options: VerifierOptions) -> str:
    """Numerics of the CPU for the model."""
    config = source.config(options.weights).with_kv(options.kv_cache_dtype)
    return numerics_for(config, "auto" if options.numerics == "auto" else "portable")


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


def _facts(source: ModelSource, options: VerifierOptions) -> dict[str, str]:
    """What must be equal in all ranks."""
    config = source.config(options.weights)
    return {
        "target": source.fingerprint(),
        "weights": config.weights,
        "dtype": str(config.dtype).removeprefix("torch."),
        "kv_cache_dtype": options.kv_cache_dtype,
        "max_context": str(options.max_context),
        "numerics": "fast" if options.numerics == "fast" else _choose_numerics(source, options),
        "device": options.device,
        "tensor_parallel": str(options.tensor_parallel),
    }


def _start(
    target: Path, options: VerifierOptions, store: str, rank: int, threads: int
) -> BaseProcess:
    """Another rank, as a process of this machine. All are forked from one that has imported torch,
    and that has no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    variables = {_STORE: store, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
    given = replace(options, threads=threads)
    process = context.Process(target=_run, args=(target, given, variables, level), daemon=True)
    process.start()
    return process


def _run(target: Path, options: VerifierOptions, variables: dict[str, str], level: str) -> None:
    """Be a rank that rank 0 has started."""
    os.setsid()  # Ctrl-C is for rank 0
    os.environ.update(variables)
    configure_logging("auto", level)
    try:
        run_other_rank(target, options)
    except Exception as error:
        _log.error("rank %s ends: %s", variables["RANK"], error)
        sys.exit(1)
