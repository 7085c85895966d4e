"""`paceline serve`: a verifier, a drafter and a gateway as child processes of one command."""

from __future__ import annotations

import argparse
import logging
import webbrowser
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from paceline.cli.drafter import load_arguments
from paceline.cli.errors import CommandError
from paceline.cli.gateway import GATEWAY_ADDRESS
from paceline.cli.service_process import (
    DRAFTER_ADDRESS,
    SHARED_ARGUMENTS,
    VERIFIER_ADDRESS,
    add_shared_arguments,
    write_atomically,
)
from paceline.cli.supervisor import Supervisor
from paceline.cli.verifier import OPTIONS, add_verifier_options
from paceline.harness import Kind, ServiceProcess
from paceline.harness.models import MODEL, drafter_spec, model_path
from paceline.service import configure_logging

logger = logging.getLogger("paceline.cli")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model and arguments of all services."""
    add = parser.add_argument
    add("model", nargs="?", type=model_path, metavar="MODEL", help=MODEL)
    # What a config file gives as the verifier's target.
    add("--target", type=model_path, help=argparse.SUPPRESS)
    add(
        "--drafter",
        action="append",
        type=drafter_spec,
        metavar="[NAME=]METHOD[:DIR][,KEY=VALUE...]",
        help="drafter to load; repeatable, the first is the default one (default: those that ship "
        "for MODEL and ngram; where there are none, ngram and selfspec). Its name is that of the "
        "method unless given",
    )
    add(
        "--drafter-device",
        metavar="D",
        help="device of drafters with weights: auto, cpu, cuda or cuda:N, as of `paceline drafter` "
        "(default: cpu with --device cpu or --share-weights, else auto)",
    )
    add("--open", action="store_true", help="open the gateway's page in a browser")
    add("--verifier-address", default=VERIFIER_ADDRESS, metavar="A", help="default: %(default)s")
    add("--drafter-address", default=DRAFTER_ADDRESS, metavar="A", help="default: %(default)s")
    add(
        "--gateway-address",
        default=GATEWAY_ADDRESS,
        metavar="A",
        help="where to serve OpenAI's HTTP interface; none: do not (default: %(default)s)",
    )
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
        help="write the addresses of verifier, drafter and gateway, a line each, once calls are "
        "answered",
    )
    add_verifier_options(parser)
    add_shared_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run all until a signal; 0 after a drain, 1 if the verifier died, 2 if one does not start.

    SIGTERM and SIGINT are forwarded to all services: the first drains, a second ends at once.
    """
    model = args.model or args.target
    if model is None:
        raise CommandError(f"which model? Give a {MODEL}")
    configure_logging(args.log_format, args.log_level)
    verifier = _service(
        "verifier",
        args.verifier_address,
        [f"--target={model}", *_arguments(args, OPTIONS), *_common(args, 0)],
    )
    drafter = _service("drafter", args.drafter_address, _drafter_arguments(args, model))
    processes = [verifier, drafter]

    def gateway() -> ServiceProcess | None:
        if args.gateway_address == "none":
            return None
        if find_spec("aiohttp") is None:
            logger.warning("no gateway: run pip install 'paceline[gateway]'")
            return None
        services = [
            f"--verifier-address={verifier.address}",
            f"--drafter-address={drafter.address}",
        ]
        arguments = [*services, *_gateway_arguments(args)]
        processes.append(_service("gateway", args.gateway_address, arguments))
        return processes[-1]

    def ready() -> None:
        for process in processes:
            print(f"{process.kind:9} {_url(process, args)}", flush=True)
        if args.ready_file is not None:
            lines = (f"{process.address}\n" for process in processes)
            write_atomically(args.ready_file, "".join(lines))
        if args.open and (url := _url(processes[-1], args)).startswith("http"):
            webbrowser.open(url)

    return Supervisor(verifier, drafter, gateway, ready).run()


def _service(kind: Kind, address: str, arguments: Sequence[str]) -> ServiceProcess:
    unlimited = float("inf")
    return ServiceProcess(kind, arguments, address=address, show_log=True, ready_seconds=unlimited)


def _drafter_arguments(args: argparse.Namespace, model: Path) -> list[str]:
    device = args.drafter_device
    if device is None:
        device = "cpu" if args.share_weights or args.device == "cpu" else "auto"
    loads = load_arguments(args.drafter or (), model, args.weights or "auto")
    arguments = [*loads, f"--device={device}", *_arguments(args, ("record",)), *_common(args, 1)]
    if args.tls_cert is not None:
        # Both serve with this certificate: the drafter trusts it when it reads the verifier's KV.
        arguments.append(f"--verifier-tls-ca={args.tls_cert}")
    return arguments


def _gateway_arguments(args: argparse.Namespace) -> list[str]:
    """The gateway serves with the services' certificate, and trusts it as the drafter does."""
    arguments = [
        *_arguments(args, ("token_file", "drain_seconds", "log_format", "log_level")),
        *_metrics_arguments(args, 2),
    ]
    if args.tls_cert is not None:
        arguments.append(f"--tls-ca={args.tls_cert}")
        arguments += [f"--http-tls-cert={args.tls_cert}", f"--http-tls-key={args.tls_key}"]
    if args.tls_client_ca is not None:
        arguments += [f"--tls-cert={args.tls_cert}", f"--tls-key={args.tls_key}"]
    return arguments


def _url(process: ServiceProcess, args: argparse.Namespace) -> str:
    """The address of a service, for a gateway that of its page."""
    if process.kind != "gateway" or process.address.startswith("unix:"):
        return process.address
    return f"{'http' if args.tls_cert is None else 'https'}://{process.address}/"


def _common(args: argparse.Namespace, offset: int) -> list[str]:
    """Arguments that verifier and drafter share."""
    return [*_arguments(args, SHARED_ARGUMENTS), *_metrics_arguments(args, offset)]


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
