"""`paceline serve`: a verifier and a drafter as child processes of one command."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.processes import ServiceProcess
from paceline.cli.service_process import (
    DRAFTER_ADDRESS,
    SHARED_ARGUMENTS,
    VERIFIER_ADDRESS,
    add_shared_arguments,
    write_atomically,
)
from paceline.cli.supervisor import Supervisor
from paceline.cli.verifier import OPTIONS, add_target_arguments
from paceline.service import configure_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments of both services."""
    parser.add_argument(
        "--drafter",
        action="append",
        metavar="METHOD[:DIR][,KEY=VALUE...]",
        help="drafter to load, with NAME= before it where the name is not to be the method's; "
        "may be repeated, the first is the default one (default: ngram)",
    )
    parser.add_argument(
        "--drafter-device",
        metavar="D",
        help="where drafters with weights compute: auto, cpu, cuda or cuda:N, as of `paceline "
        "drafter` (default: the CPU if the verifier is told to be there, else auto); --device is "
        "the verifier's",
    )
    parser.add_argument(
        "--verifier-address", default=VERIFIER_ADDRESS, metavar="A", help="default: %(default)s"
    )
    parser.add_argument(
        "--drafter-address", default=DRAFTER_ADDRESS, metavar="A", help="default: %(default)s"
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="keep the texts of drafted generations in this folder, to train drafters with",
    )
    parser.add_argument(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help="write both addresses, verifier first, a line each, once calls are answered",
    )
    add_target_arguments(parser)
    add_shared_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run both until a signal; 0 after a drain, 1 when the verifier died, 2 if one cannot start.

    SIGTERM and SIGINT go on to both services: the first one drains, a second one ends at once.
    """
    configure_logging(args.log_format, args.log_level)
    shared = _flags(args, SHARED_ARGUMENTS)
    verifier = ServiceProcess(
        "verifier",
        [*_flags(args, ("target", *OPTIONS)), *shared, *_metrics_flags(args, 0)],
        address=args.verifier_address,
        show_log=True,
        ready_seconds=float("inf"),
    )
    # They serve with one certificate; the drafter need trust no other to read the verifier's KV.
    trust = [] if args.tls_cert is None else [f"--verifier-tls-ca={args.tls_cert}"]
    drafter = ServiceProcess(
        "drafter",
        [
            *(f"--load={spec}" for spec in args.drafter or ["ngram"]),
            f"--device={args.drafter_device or _drafter_device(args)}",
            *(*_flags(args, ("record",)), *trust, *shared, *_metrics_flags(args, 1)),
        ],
        address=args.drafter_address,
        show_log=True,
        ready_seconds=float("inf"),
    )
    return Supervisor(verifier, drafter, lambda: _tell(verifier, drafter, args.ready_file)).run()


def _drafter_device(args: argparse.Namespace) -> str:
    """On the CPU beside a verifier that was told to be there."""
    return "cpu" if args.share_weights or args.device == "cpu" else "auto"


def _metrics_flags(args: argparse.Namespace, offset: int) -> list[str]:
    """Where one of the services shows its metrics: `offset` ports above the first."""
    if args.metrics_address is None:
        return ["--insecure-metrics"] if args.insecure_metrics else []
    host, colon, port = args.metrics_address.rpartition(":")
    if port.isdecimal() and int(port):
        port = str(int(port) + offset)
    insecure = ["--insecure-metrics"] if args.insecure_metrics else []
    return [f"--metrics-address={host}{colon}{port}", *insecure]


def _tell(verifier: ServiceProcess, drafter: ServiceProcess, ready_file: Path | None) -> None:
    print(f"verifier  {verifier.address}\ndrafter   {drafter.address}", flush=True)
    if ready_file is not None:
        write_atomically(ready_file, f"{verifier.address}\n{drafter.address}\n")


def _flags(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """The arguments as the children's command line; secrets are in files or the environment."""
    given = ((name, getattr(args, name)) for name in names)
    return [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in given
        if value is not None
    ]
