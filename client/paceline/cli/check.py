"""`paceline check`: the text of a receipt, generated again and compared."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from paceline.cli.command import CommandError, added_by, exit_with, refuse_options
from paceline.cli.connection import (
    add_connection_arguments,
    add_service_arguments,
    client_of,
)
from paceline.cli.progress import described, waiting
from paceline.cli.service_process import run_async
from paceline.client import Client, InvalidRequestError, PacelineError, Receipt, ReceiptCheck
from paceline.formats import KV_CACHE_DTYPES, WEIGHTS
from paceline.harness import ProcessFailed, ServiceProcess
from paceline.harness.models import MODEL, local_model
from paceline.service.files import read_text
from paceline.service.options import OptionsError
from paceline.service.runtime import printable

_CODES = {"equal": 0, "different": 1, "model": 3, "numerics": 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "receipt",
        type=Path,
        metavar="RECEIPT",
        help="file that `paceline generate --receipt` has written, or a receipt of a gateway",
    )
    add(
        "--target",
        type=local_model,
        metavar="MODEL",
        help=f"start a verifier for it, with the receipt's formats and numerics: {MODEL} (default: "
        "use a running verifier)",
    )
    add_service_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Check; 0 if all tokens are equal, 1 if one is not or a service failed, 2 for bad arguments, 3
    if model or numerics differ, so that tokens cannot be compared."""
    try:
        if args.receipt.stat().st_size > Receipt.MAX_CHARACTERS:
            raise ValueError(f"it is longer than {Receipt.MAX_CHARACTERS} bytes")
        receipt = Receipt.from_text(read_text(args.receipt))
    except (OSError, ValueError, InvalidRequestError) as error:
        raise CommandError(f"{args.receipt} is no receipt: {error}") from error
    if args.target is not None:
        unused = {"verifier_address", *added_by(add_connection_arguments)}
        refuse_options(args, "on a verifier that is started for --target", unused)
    with exit_with(1, ProcessFailed, PacelineError), _verifier(args, receipt):
        with exit_with(2, OptionsError, ValueError):
            client = client_of(args)
        check = run_async(_check(client, receipt))
    print(printable(check.message))  # on one line, whatever names a receipt has
    return _CODES[check.outcome]


async def _check(client: Client, receipt: Receipt) -> ReceiptCheck:
    async with client:
        return await client.check(receipt)


@contextmanager
def _verifier(args: argparse.Namespace, receipt: Receipt) -> Iterator[None]:
    """Run a verifier of --target for the length of the block, with its address in `args`."""
    if args.target is None:
        yield
        return
    from paceline.kernels._compile import levels_here  # with torch, which a client does without
    from paceline.kernels._native import VARIABLE

    rules = [rule for rule in receipt.numerics if rule.region == "numerics"]
    name, constants = (rules[0].implementation, rules[0].constants) if rules else ("", {})
    weights, kv = constants.get("weights", "auto"), constants.get("kv", "auto")
    arguments = [
        f"--target={args.target}",
        f"--weights={weights if weights in WEIGHTS else 'stored'}",
        f"--kv-cache-dtype={kv if kv in KV_CACHE_DTYPES else 'auto'}",
        f"--numerics={'portable' if name == 'portable' else 'auto'}",
        "--schedule=off",
    ]
    level = name.replace("_", "")  # of processors with numerics of their own, of which auto is one
    environment = {VARIABLE: level} if level in levels_here() else {}
    with ExitStack() as stack:
        with waiting(lambda: f"loading {described(args.target)}"):
            served = stack.enter_context(
                ServiceProcess("verifier", arguments, environment=environment)
            )
        args.verifier_address = served.address
        yield
