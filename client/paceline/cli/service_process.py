"""The life of a service process: options, logs, threads, readiness, event loop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.cli.progress import waiting
from paceline.harness import PHASE
from paceline.service import (
    OptionsError,
    ServerOptions,
    Service,
    ServiceError,
    add_server_arguments,
    check_address,
    configure_logging,
    run_server,
)
from paceline.service.cpus import default_threads
from paceline.service.phases import phases
from paceline.telemetry.exporters import traced

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger("paceline.cli")

VERIFIER_ADDRESS = "127.0.0.1:7431"
DRAFTER_ADDRESS = "127.0.0.1:7432"

FAILURE_FILE = Path(os.environ.get("TMPDIR", "/tmp"), "paceline-failure")
"""Why the service of a container does not start; gone with the container's /tmp."""

_HOLD_SECONDS = 15.0

T = TypeVar("T")


def add_process_arguments(parser: argparse.ArgumentParser, address: str) -> None:
    """Add all arguments of a service that do not depend on its models."""
    parser.add_argument(
        "--address",
        default=address,
        help="where the service listens: host:port or unix:/path (default: %(default)s)",
    )
    add_readiness_arguments(parser)
    add_shared_arguments(parser)


def add_readiness_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `ServiceProcess` passes."""
    parser.add_argument(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help="write the bound address into this file once calls are answered",
    )
    parser.add_argument(
        "--stop-with-stdin",
        action="store_true",
        help="stop when standard input closes: for a parent process that holds its other end",
    )


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    group = parser.add_argument_group("process")
    add_config_argument(group)
    group.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of a step (default: the cores of one NUMA node)",
    )
    add_log_arguments(group)


def add_config_argument(group: argparse._ActionsContainer) -> None:
    """Add `--config`, which `command.expand_config` replaces."""
    group.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with more arguments, in the tables [verifier], [drafter] and [gateway]",
    )


def add_log_arguments(group: argparse._ActionsContainer) -> None:
    """Add the arguments of `configure_logging`."""
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
        help="lowest level to log (default: info; of serve on a terminal: warning)",
    )


def run_service(
    kind: str, args: argparse.Namespace, build: Callable[[CollectorRegistry | None], Service]
) -> int:
    """Build a "verifier" or "drafter" and serve until a signal; 0 after a drain, 2 for options
    that cannot be served. `build` is called after the thread settings are in the environment and
    may import torch, which nothing may import earlier."""
    configure_logging(args.log_format, args.log_level, kind)
    if os.getpid() == 1:
        FAILURE_FILE.unlink(missing_ok=True)
    with traced(f"paceline-{kind}"), ExitStack() as starting:
        if not write_phases(args):
            starting.enter_context(waiting(lambda: f"starting: {phases.current}", logger.info))
        phases.begin("importing")

        def on_ready(address: str) -> None:
            starting.close()
            phases.on_change(str(phases))
            write_ready(args, address)

        try:
            options = ServerOptions.from_args(args)
            check_address(options.address)
            set_torch_environment(args.threads)
            raise_file_limit()
            if args.stop_with_stdin:
                stop_with_stdin()
            metrics = None
            if options.metrics_address is not None:
                from paceline.service.metrics import new_registry

                metrics = new_registry()
            service = build(metrics)
        except (OptionsError, ServiceError, ValueError, OSError) as error:
            starting.close()
            return refuse(error)
        try:
            run_async(run_server(service, options, metrics=metrics, on_ready=on_ready))
        except (OptionsError, ServiceError) as error:
            return refuse(error)
    if any(thread.name == "load" for thread in threading.enumerate()):
        logging.shutdown()
        os._exit(0)  # a model that is still being loaded would delay, or crash, a usual exit
    return 0


def write_phases(args: argparse.Namespace) -> bool:
    """Write the phases of the start where `ServiceProcess` reads them, if that is who started this
    process."""
    if not (args.stop_with_stdin and args.ready_file is not None):
        return False
    phase_file = args.ready_file.with_suffix(PHASE)
    phases.on_change = lambda now: write_atomically(phase_file, now)
    return True


def raise_file_limit() -> None:
    """Raise the limit of open files, often 1024, to the highest one allowed.

    Each connection is an open file, and each KV cache has two.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS does not accept its own limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def refuse(error: Exception) -> int:
    """Log why the service does not start, and tell who started it; returns exit code 2.

    In a container of its own it first waits for a while, or a signal: health checks say the reason
    then, and restarts are not too many.
    """
    logger.error("cannot serve: %s", error, exc_info=logger.isEnabledFor(logging.DEBUG))
    phases.on_change(str(error))
    if os.getpid() == 1:
        with suppress(OSError):
            FAILURE_FILE.write_text(f"{error}\n", encoding="utf-8")
        signals = (signal.SIGTERM, signal.SIGINT)
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        signal.sigtimedwait(signals, _HOLD_SECONDS)
    return 2


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine with uvloop, or with asyncio where uvloop is not installed."""
    with new_runner() as runner:
        return runner.run(work)


def new_runner() -> asyncio.Runner:
    """Return a runner with uvloop's event loop, or with asyncio's where uvloop is not installed."""
    if find_spec("uvloop") is None:
        return asyncio.Runner()
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def set_torch_environment(threads: int | None) -> None:
    """Set the environment of the OpenMP runtime that torch loads later.

    Threads spin for some 10 microseconds and then sleep. That is longer than the gap between two
    operations of a step, and leaves the cores to the other service when a step ends. Large tensors
    get huge pages, which makes a step, which reads all weights, about 10% faster. Variables that
    are already set are kept, except for the number of threads if `threads` is given. Raises
    OptionsError: `threads` is below 1.
    """
    if threads is not None:
        if threads < 1:
            raise OptionsError("--threads must be at least 1")
        os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(default_threads()))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy starts them when it is imported
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    os.environ.setdefault("KMP_BLOCKTIME", "1")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def write_ready(args: argparse.Namespace, content: str) -> None:
    """Write a bound address, or several, into `--ready-file`, if that is given."""
    if args.ready_file is not None:
        write_atomically(args.ready_file, content)


def write_atomically(file: Path, text: str) -> None:
    """Write `file` such that no reader sees a part of the text."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


def stop_with_stdin() -> None:
    """Send SIGTERM to this process when its standard input closes."""

    def wait() -> None:
        while os.read(0, 4096):  # in a fork `sys.stdin` is the parent's
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stop-with-stdin", daemon=True).start()
