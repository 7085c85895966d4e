"""`paceline verifier`: serves a target model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from paceline.cli.service_process import VERIFIER_ADDRESS, add_process_arguments, run_service
from paceline.harness.models import MODEL, model_path
from paceline.service import Service
from paceline.service.arguments import add_options, given_options

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add target, cache and server arguments."""
    parser.add_argument("--target", type=model_path, required=True, metavar="MODEL", help=MODEL)
    add_verifier_options(parser)
    add_process_arguments(parser, VERIFIER_ADDRESS)


def add_verifier_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a verifier."""
    from paceline.verifier import VerifierOptions

    group = parser.add_argument_group("verifier")
    add_options(group, VerifierOptions)
    group.set_defaults(device="auto")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    return run_service("verifier", args, lambda metrics: _build(args, metrics))


def _build(args: argparse.Namespace, metrics: CollectorRegistry | None) -> Service:
    from paceline.verifier import VerifierOptions, build_service

    given = given_options(args, VerifierOptions)
    return build_service(args.target, threads=args.threads, metrics=metrics, **given)
