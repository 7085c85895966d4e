"""What `paceline verifier` and `paceline drafter` share: the life of a service process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.service import (
    SERVER_ARGUMENTS,
    OptionsError,
    ServerOptions,
    Service,
    ServiceError,
    add_server_arguments,
    configure_logging,
    run_server,
)
from paceline.telemetry.exporters import traced

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger("paceline.cli")

VERIFIER_ADDRESS = "127.0.0.1:7431"
DRAFTER_ADDRESS = "127.0.0.1:7432"


# Arguments of both kinds of service that `paceline serve` hands down to them.
SHARED_ARGUMENTS = (*SERVER_ARGUMENTS, "threads", "log_format", "log_level")


def add_process_arguments(parser: argparse.ArgumentParser, address: str) -> None:
    """Add all arguments that have nothing to do with models."""
    parser.add_argument(
        "--address", default=address, help="host:port or unix:/path (default: %(default)s)"
    )
    add_readiness_arguments(parser)
    add_shared_arguments(parser)


def add_readiness_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what parents of the process use: see `ServiceProcess`."""
    parser.add_argument(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help="write the bound address into this file once calls are answered",
    )
    parser.add_argument(
        "--stop-with-stdin",
        action="store_true",
        help="stop when standard input closes: for parents that hold its other end",
    )


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the SHARED_ARGUMENTS."""
    add_server_arguments(parser)
    group = parser.add_argument_group("process")
    group.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with more arguments, in the tables [verifier] and [drafter]",
    )
    group.add_argument(
        "--threads", type=int, metavar="N", help="compute threads (default: all cores)"
    )
    add_log_arguments(group)


def add_log_arguments(group: argparse._ActionsContainer) -> None:
    """Add what `configure_logging` takes."""
    group.add_argument(
        "--log-format",
        choices=["auto", "json", "text"],
        default="auto",
        help="auto: text on a terminal, else JSON lines (default: %(default)s)",
    )
    group.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="least severe message to show (default: %(default)s)",
    )


def run_service(
    kind: str, args: argparse.Namespace, build: Callable[[CollectorRegistry | None], Service]
) -> int:
    """Build and serve until a signal; 0 after a drain, 2 for options that cannot be served.

    Args:
        kind: "verifier" or "drafter", for traces.
        args: parsed from `add_process_arguments`.
        build: makes the service, whose metrics go into the registry if there is one. Called after
            the thread settings are in the environment, so it may import torch; nothing may have
            imported it before.
    """
    configure_logging(args.log_format, args.log_level)
    with traced(f"paceline-{kind}"):
        return _build_and_serve(args, build)


def _build_and_serve(
    args: argparse.Namespace, build: Callable[[CollectorRegistry | None], Service]
) -> int:
    try:
        options = ServerOptions.from_args(args)
        set_torch_environment(args.threads)
        if args.stop_with_stdin:
            stop_with_stdin()
        metrics = _metrics(options)
        service = build(metrics)
    except (OptionsError, ServiceError, ValueError, OSError) as error:
        return refuse(error)
    try:
        serving = run_server(
            service, options, metrics=metrics, on_ready=lambda address: _ready(args, address)
        )
        _run(serving)
    except (OptionsError, ServiceError) as error:
        return refuse(error)
    return 0


def _metrics(options: ServerOptions) -> CollectorRegistry | None:
    if options.metrics_address is None:
        return None
    from paceline.service.metrics import new_registry

    return new_registry()


def refuse(error: Exception) -> int:
    """Log why the service cannot be served as it was asked for; the exit code."""
    logger.error("cannot serve: %s", error, exc_info=logger.isEnabledFor(logging.DEBUG))
    return 2


def set_torch_environment(threads: int | None) -> None:
    """Fix thread count and waiting for the OpenMP runtime that torch loads later.

    Threads spin for a few dozen microseconds and then sleep: long enough to bridge the gap between
    two operations of a step (a sleeping thread takes longer to wake than most of them last), short
    enough to leave the cores to whoever's turn it is next, drafter or verifier. Weights lie in huge
    pages. Variables that are set already win, but for the count when `threads` is given.

    Raises:
        OptionsError: if `threads` is below 1.
    """
    if threads is not None:
        if threads < 1:
            raise OptionsError("--threads must be at least 1")
        os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(_cores()))
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    os.environ.setdefault("KMP_BLOCKTIME", "1")
    use_huge_pages()


def use_huge_pages() -> None:
    """Let torch, loaded later, keep large tensors in huge pages where the system lends them.

    A step reads all weights, and reads them about a tenth faster.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def write_atomically(file: Path, text: str) -> None:
    """Write `file` so that no reader ever sees half of it."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(file)


def _ready(args: argparse.Namespace, address: str) -> None:
    if args.ready_file is not None:
        write_atomically(args.ready_file, address)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def stop_with_stdin() -> None:
    """SIGTERM to this process when its standard input closes."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stop-with-stdin", daemon=True).start()


def _run(main: Coroutine[Any, Any, None]) -> None:
    # Not there on Windows, nor where the sources run beside packages that somebody else chose.
    if find_spec("uvloop") is None:
        asyncio.run(main)
    else:
        import uvloop

        uvloop.run(main)
