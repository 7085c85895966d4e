"""`paceline drafter`: serves drafters."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.service_process import (
    DRAFTER_ADDRESS,
    add_process_arguments,
    refuse,
    run_service,
)
from paceline.cli.units import byte_count
from paceline.service import Service
from paceline.service.options import read_token

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_OPTIONS = (
    *("device", "max_context", "max_streams", "state_dir", "recordings"),
    *("record", "record_bytes"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add drafter and server arguments."""
    group = parser.add_argument_group("drafter")
    group.add_argument(
        "--load",
        action="append",
        default=[],
        metavar="NAME=METHOD[:DIR][,KEY=VALUE...]",
        help="drafter to load at start; may be repeated, the first is the default one",
    )
    group.add_argument(
        "--root",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="folder below which clients may have drafters loaded; may be repeated (default: "
        "the folders of --load and their parents)",
    )
    group.add_argument(
        "--device",
        default="auto",
        metavar="D",
        help="where drafters with weights compute: auto (default: the second GPU, the only one, or "
        "the CPU where there is none), cpu, cuda or cuda:N; KV of a verifier on a GPU is mapped by "
        "drafters on a GPU, and followed by others",
    )
    group.add_argument("--max-context", type=int, metavar="N", help="longest text, in tokens")
    group.add_argument(
        "--max-streams", type=int, metavar="N", help="most generations attached at a time"
    )
    group.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="keep what is loaded here, and take it up again after a restart with the same --load",
    )
    group.add_argument(
        "--recordings",
        type=Path,
        metavar="FILE",
        help='JSON lines {"prompt": [...], "tokens": [...]} of token ids: every version must draft '
        "along these texts before it gets traffic",
    )
    group.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="keep the texts of generations in this folder, to train drafters with (default: none "
        "are kept)",
    )
    group.add_argument(
        "--record-bytes",
        type=byte_count,
        metavar="SIZE",
        help="most room for them, such as 1GiB; the oldest go first (default: 64MiB)",
    )
    group.add_argument(
        "--verifier",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="verifier on another machine, by the address that clients use, whose KV may be "
        "followed; may be repeated (those on this machine need not be named)",
    )
    group.add_argument(
        "--kv-address",
        default=os.environ.get("PACELINE_KV_ADDRESS") or None,
        metavar="HOST:PORT",
        help="read KV from the verifier here, whatever address clients know it by: for one in the "
        "same pod (or set PACELINE_KV_ADDRESS)",
    )
    group.add_argument(
        "--verifier-tls-ca",
        type=Path,
        metavar="PEM",
        help="speak TLS with verifiers whose KV a drafter reads, trusting these roots; "
        "--tls-cert is shown to those that ask for a certificate",
    )
    add_process_arguments(parser, DRAFTER_ADDRESS)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; the exit code."""
    # Imports no torch: that must wait until the thread settings are made.
    from paceline.drafter import LoadError

    try:
        return run_service("drafter", args, lambda metrics: _build(args, metrics))
    except LoadError as error:
        return refuse(error)


def _build(args: argparse.Namespace, metrics: CollectorRegistry | None) -> Service:
    from paceline.drafter import DrafterSpec, VerifierAccess, build_service

    given: dict[str, Any] = {
        name: value for name in _OPTIONS if (value := getattr(args, name)) is not None
    }
    access = VerifierAccess(
        remote=tuple(args.verifier),
        beside=args.kv_address,
        token=read_token(args.token_file),
        tls_ca=args.verifier_tls_ca,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
    )
    return build_service(
        [DrafterSpec.parse(text) for text in args.load],
        roots=args.root,
        threads=args.threads,
        access=access,
        metrics=metrics,
        **given,
    )
