"""`paceline verifier`: serves a target model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.service_process import VERIFIER_ADDRESS, add_process_arguments, run_service
from paceline.cli.units import byte_count
from paceline.service import Service

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

# Options of the service, and the arguments that `paceline serve` hands down with the target.
OPTIONS = (
    *("device", "dtype", "kv_bytes", "max_context", "max_sequences", "lease_seconds"),
    *("node_budget", "step_token_limit", "prefill_token_limit", "share_weights"),
    "schedule",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add target, cache and server arguments."""
    add_target_arguments(parser)
    add_process_arguments(parser, VERIFIER_ADDRESS)


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Add those that `paceline serve` hands down. One without a default has the service's own."""
    group = parser.add_argument_group("verifier")
    group.add_argument("--target", type=Path, required=True, metavar="DIR", help="HF model folder")
    group.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16"], help="of weights and KV cache"
    )
    group.add_argument(
        "--device",
        default="auto",
        metavar="D",
        help="where the model runs: auto (default: the first GPU, or the CPU where there is none "
        "or with --share-weights), cpu, cuda or cuda:N",
    )
    group.add_argument(
        "--kv-bytes", type=byte_count, metavar="N", help="memory for KV caches, such as 4GiB"
    )
    group.add_argument("--max-context", type=int, metavar="N", help="longest text, in tokens")
    group.add_argument(
        "--max-sequences", type=int, metavar="N", help="most generations held at a time"
    )
    group.add_argument(
        "--lease-seconds", type=float, metavar="S", help="life of a cache nobody renews"
    )
    group.add_argument(
        "--node-budget", type=int, metavar="N", help="most drafted nodes checked in a round"
    )
    group.add_argument(
        "--step-token-limit", type=int, metavar="N", help="most round tokens in one forward pass"
    )
    group.add_argument(
        "--prefill-token-limit",
        type=int,
        metavar="N",
        help="most prompt tokens in one forward pass",
    )
    group.add_argument(
        "--share-weights",
        action="store_const",
        const=True,
        help="keep the weights in /dev/shm, where selfspec drafters map them",
    )
    group.add_argument(
        "--schedule",
        choices=["off", "auto", "profile"],
        help="auto (default): draft and check nodes as far as they pay under the load, by a table "
        "of step times from the first start; profile: measure that table again; off: check all",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; the exit code."""
    return run_service("verifier", args, lambda metrics: _build(args, metrics))


def _build(args: argparse.Namespace, metrics: CollectorRegistry | None) -> Service:
    from paceline.verifier import build_service

    given: dict[str, Any] = {
        name: value for name in OPTIONS if (value := getattr(args, name)) is not None
    }
    return build_service(args.target, threads=args.threads, metrics=metrics, **given)
