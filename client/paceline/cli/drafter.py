"""`paceline drafter`: serves drafters."""

import argparse
from pathlib import Path
from typing import Any

from paceline.cli.service_process import DRAFTER_ADDRESS, add_process_arguments, run_service
from paceline.service import Service


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
        type=Path,
        metavar="DIR",
        help="folder below which LoadDrafter may load; may be repeated",
    )
    add_process_arguments(parser, DRAFTER_ADDRESS)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; the exit code."""
    return run_service(args, lambda: _build(args))


def _build(args: argparse.Namespace) -> Service:
    from paceline.drafter import DrafterSpec, build_service

    given: dict[str, Any] = {"roots": args.root} if args.root else {}
    service: Service = build_service([DrafterSpec.parse(text) for text in args.load], **given)
    return service
