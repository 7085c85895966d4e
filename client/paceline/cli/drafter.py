"""`paceline drafter`: serves drafters."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.service_process import (
    DRAFTER_ADDRESS,
    add_process_arguments,
    refuse,
    run_service,
)
from paceline.cli.units import byte_count
from paceline.cli.verifier import WEIGHTS
from paceline.harness.models import drafter_spec, model_path
from paceline.service import Service
from paceline.service.options import read_token

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_OPTIONS = (
    *("device", "overlap", "max_context", "max_streams", "state_dir", "recordings"),
    *("record", "record_bytes"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add drafter and server arguments."""
    add = parser.add_argument_group("drafter").add_argument
    add(
        "--load",
        type=drafter_spec,
        action="append",
        default=[],
        metavar="NAME=METHOD[:DIR][,KEY=VALUE...]",
        help="drafter to load at start; repeatable, the first is the default one",
    )
    add(
        "--target",
        type=model_path,
        metavar="MODEL",
        help="without --load: load the drafters that ship for this target and ngram; where there "
        "are none, ngram and selfspec; on a CPU, selfspec first for bfloat16 and float32",
    )
    add(
        "--target-weights",
        choices=WEIGHTS,
        default="auto",
        help="--weights of the verifier, which the choice for --target depends on",
    )
    add(
        "--root",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="folder below which clients may load drafters; repeatable (default: the folders of "
        "--load and their parents)",
    )
    add(
        "--device",
        default="auto",
        metavar="D",
        help="device of drafters with weights: auto (default: the second GPU, the only one, or the "
        "CPU), cpu, cuda or cuda:N; drafters on a GPU map the KV of a verifier on a GPU, drafters "
        "on the CPU receive it over gRPC",
    )
    add(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="draft on while the verifier works: chains of lm and selfspec; it pays where the "
        "drafter has cores or a device of its own (default: on a GPU)",
    )
    add("--max-context", type=int, metavar="N", help="longest text, in tokens")
    add("--max-streams", type=int, metavar="N", help="most generations attached at a time")
    add(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="save the loaded versions here, and restore them after a restart with the same --load",
    )
    add(
        "--recordings",
        type=Path,
        metavar="FILE",
        help='JSON lines {"prompt": [...], "tokens": [...]} of token ids: every version must draft '
        "for these texts before it gets traffic",
    )
    add(
        "--record",
        type=Path,
        metavar="DIR",
        help="record the texts of generations in this folder, to train drafters with (default: no "
        "recording)",
    )
    add(
        "--record-bytes",
        type=byte_count,
        metavar="SIZE",
        help="most bytes recorded, such as 1GiB; the oldest are deleted first (default: 64MiB)",
    )
    add(
        "--verifier",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="verifier on another machine that drafters may read KV from, by the address that "
        "clients use; repeatable (verifiers on this machine are always allowed)",
    )
    add(
        "--kv-address",
        default=os.environ.get("PACELINE_KV_ADDRESS") or None,
        metavar="HOST:PORT",
        help="read KV from the verifier at this address instead of the one that clients use: for a "
        "verifier in the same pod (or set PACELINE_KV_ADDRESS)",
    )
    add(
        "--verifier-tls-ca",
        type=Path,
        metavar="PEM",
        help="use TLS and trust these roots when reading KV; --tls-cert is the client certificate",
    )
    add_process_arguments(parser, DRAFTER_ADDRESS)


def load_arguments(specs: Iterable[str], model: Path, weights: str) -> list[str]:
    """Arguments of `paceline drafter` that load `specs`; if empty, what suits the target.

    Args:
        specs: Drafters, as of `--load`.
        model: The target of the verifier beside it.
        weights: `--weights` of that verifier.
    """
    loads = [f"--load={spec}" for spec in specs]
    return loads or [f"--target={model}", f"--target-weights={weights}"]


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    # Imports no torch: torch must be imported after the thread settings.
    from paceline.drafter import LoadError

    try:
        return run_service("drafter", args, lambda metrics: _build(args, metrics))
    except LoadError as error:
        return refuse(error)


def _build(args: argparse.Namespace, metrics: CollectorRegistry | None) -> Service:
    from paceline.cli.shipped import drafters_for
    from paceline.drafter import DrafterSpec, VerifierAccess, build_service, drafting_device

    load = args.load
    if not load and args.target is not None:
        device = drafting_device(args.device or "auto")
        load = drafters_for(args.target, device, args.target_weights)

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
        [DrafterSpec.parse(text) for text in load],
        roots=args.root,
        threads=args.threads,
        access=access,
        metrics=metrics,
        **given,
    )
