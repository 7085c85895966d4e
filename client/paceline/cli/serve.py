"""`paceline serve`: a verifier and a drafter as child processes of one command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.service_process import (
    DRAFTER_ADDRESS,
    SHARED_ARGUMENTS,
    VERIFIER_ADDRESS,
    add_shared_arguments,
    write_atomically,
)
from paceline.cli.supervisor import Supervisor
from paceline.cli.verifier import OPTIONS, add_target_arguments
from paceline.harness import Kind, ServiceProcess
from paceline.service import configure_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments of both services."""
    add = parser.add_argument
    add(
        "--drafter",
        action="append",
        metavar="[NAME=]METHOD[:DIR][,KEY=VALUE...]",
        help="drafter to load; repeatable, the first is the default one (default: ngram). Its "
        "name is that of the method unless given",
    )
    add(
        "--drafter-device",
        metavar="D",
        help="device of drafters with weights: auto, cpu, cuda or cuda:N, as of `paceline drafter` "
        "(default: cpu with --device cpu or --share-weights, else auto)",
    )
    add("--verifier-address", default=VERIFIER_ADDRESS, metavar="A", help="default: %(default)s")
    add("--drafter-address", default=DRAFTER_ADDRESS, metavar="A", help="default: %(default)s")
    add(
        "--record",
        type=Path,
        metavar="DIR",
        help="record the texts of drafted generations in this folder, to train drafters with",
    )
    add(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help="write both addresses, verifier first, a line each, once calls are answered",
    )
    add_target_arguments(parser)
    add_shared_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run both until a signal; 0 after a drain, 1 if the verifier died, 2 if one does not start.

    SIGTERM and SIGINT are forwarded to both services: the first drains, a second ends at once.
    """
    configure_logging(args.log_format, args.log_level)
    shared = _arguments(args, SHARED_ARGUMENTS)
    device = args.drafter_device
    if device is None:
        device = "cpu" if args.share_weights or args.device == "cpu" else "auto"
    drafter_arguments = [
        *(f"--load={spec}" for spec in args.drafter or ["ngram"]),
        f"--device={device}",
        *_arguments(args, ("record",)),
        *(*shared, *_metrics_arguments(args, 1)),
    ]
    if args.tls_cert is not None:
        # Both serve with this certificate: the drafter trusts it when it reads the verifier's KV.
        drafter_arguments.append(f"--verifier-tls-ca={args.tls_cert}")
    verifier_arguments = [
        *_arguments(args, ("target", *OPTIONS)),
        *(*shared, *_metrics_arguments(args, 0)),
    ]

    def service(kind: Kind, address: str, arguments: Sequence[str]) -> ServiceProcess:
        unlimited = float("inf")
        return ServiceProcess(
            kind, arguments, address=address, show_log=True, ready_seconds=unlimited
        )

    verifier = service("verifier", args.verifier_address, verifier_arguments)
    drafter = service("drafter", args.drafter_address, drafter_arguments)

    def ready() -> None:
        print(f"verifier  {verifier.address}\ndrafter   {drafter.address}", flush=True)
        if args.ready_file is not None:
            write_atomically(args.ready_file, f"{verifier.address}\n{drafter.address}\n")

    return Supervisor(verifier, drafter, ready).run()


def _metrics_arguments(args: argparse.Namespace, offset: int) -> list[str]:
    """Metrics arguments of a service, whose port is `offset` above the given one."""
    insecure = ["--insecure-metrics"] if args.insecure_metrics else []
    if args.metrics_address is None:
        return insecure
    host, colon, port = args.metrics_address.rpartition(":")
    if port.isdecimal() and int(port):
        port = str(int(port) + offset)
    return [f"--metrics-address={host}{colon}{port}", *insecure]


def _arguments(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """The named arguments as a command line; secrets stay in files or the environment."""
    given = ((name, getattr(args, name)) for name in names)
    return [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in given
        if value is not None
    ]
