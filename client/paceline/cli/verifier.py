"""`paceline verifier`: serves a target model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from paceline.cli.service_process import VERIFIER_ADDRESS, add_process_arguments, run_service
from paceline.cli.units import byte_count
from paceline.harness.models import MODEL, model_path
from paceline.service import Service

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

WEIGHTS = ("auto", "float32", "bfloat16", "int8", "int4")
"""Formats of the target's weights."""

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "int8")
"""Types of KV caches."""

OPTIONS = (
    *("device", "weights", "numerics", "kv_cache_dtype", "kv_bytes", "max_context"),
    *("max_sequences", "lease_seconds", "prefix_caching", "node_budget", "step_token_limit"),
    *("prefill_token_limit", "share_weights", "schedule"),
)
"""Options of the service that `paceline serve` passes on, besides the target."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add target, cache and server arguments."""
    parser.add_argument("--target", type=model_path, required=True, metavar="MODEL", help=MODEL)
    add_verifier_options(parser)
    add_process_arguments(parser, VERIFIER_ADDRESS)


def add_verifier_options(parser: argparse.ArgumentParser) -> None:
    """Add the OPTIONS. Without a default, the service's own default applies."""
    add = parser.add_argument_group("verifier").add_argument
    add(
        "--weights",
        choices=WEIGHTS,
        help="auto (default): as stored; int8 and int4: quantised when loaded, in blocks of 32; "
        "float32 and bfloat16 are also the type of hidden states",
    )
    add(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        help="type of KV caches: auto (default): that of hidden states; int8: about half the "
        "memory of bfloat16, on the CPU",
    )
    add(
        "--numerics",
        choices=("auto", "portable"),
        help="portable: the same tokens on every x86-64 and ARM processor; auto (default): the "
        "fastest way to multiply bfloat16, which differs on processors with AMX",
    )
    add(
        "--device",
        default="auto",
        metavar="D",
        help="device of the model: auto (default: the first GPU; the CPU without a GPU or with "
        "--share-weights), cpu, cuda or cuda:N",
    )
    add("--kv-bytes", type=byte_count, metavar="N", help="memory for KV caches, such as 4GiB")
    add("--max-context", type=int, metavar="N", help="longest text, in tokens")
    add("--max-sequences", type=int, metavar="N", help="most sequences at a time")
    add(
        "--no-prefix-caching",
        dest="prefix_caching",
        action="store_const",
        const=False,
        help="free the KV of ended texts at once; by default it is kept while there is memory, and "
        "a prompt of the same client that begins in the same way takes it over",
    )
    add("--lease-seconds", type=float, metavar="S", help="lease of a cache that is not renewed")
    add("--node-budget", type=int, metavar="N", help="most drafted nodes verified in a round")
    add("--step-token-limit", type=int, metavar="N", help="most round tokens in a forward pass")
    add("--prefill-token-limit", type=int, metavar="N", help="most prompt tokens in a forward pass")
    add(
        "--share-weights",
        action="store_const",
        const=True,
        help="keep the weights in /dev/shm, where selfspec drafters map them",
    )
    add(
        "--schedule",
        choices=["off", "auto", "profile"],
        help="auto (default): set node budgets by the load, with a table of step times that the "
        "first start measures; profile: measure the table again; off: verify all nodes",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    return run_service("verifier", args, lambda metrics: _build(args, metrics))


def _build(args: argparse.Namespace, metrics: CollectorRegistry | None) -> Service:
    from paceline.verifier import build_service

    given: dict[str, Any] = {
        name: value for name in OPTIONS if (value := getattr(args, name)) is not None
    }
    return build_service(args.target, threads=args.threads, metrics=metrics, **given)
