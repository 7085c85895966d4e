"""Connections of client commands to services: addresses, TLS and token; `paceline health`.

Environment variables replace arguments that are not given: `PACELINE_VERIFIER_ADDRESS`,
`PACELINE_TLS_CA`, and `PACELINE_TOKEN` or `PACELINE_TOKEN_FILE`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from paceline.cli.command import CommandError, exit_with, refuse_options
from paceline.cli.progress import waiting
from paceline.client import Client, Connections, InvalidRequestError, RetryOptions, TlsOptions
from paceline.service.options import read_token
from paceline.tokens import noted_services

_POLL_SECONDS = 0.2


def verifier_address() -> str:
    return os.environ.get("PACELINE_VERIFIER_ADDRESS") or "127.0.0.1:7431"


def add_service_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the verifier's address, retries, TLS and token; returns the first group."""
    group = parser.add_argument_group("services")
    add = group.add_argument
    add(
        "--verifier-address",
        default=verifier_address(),
        metavar="A",
        help="address of the verifier: host:port, unix:/path, dns:///name:port, or a list of these "
        "with commas (default: %(default)s)",
    )
    add(
        "--retry-seconds",
        type=float,
        default=RetryOptions().budget,
        metavar="S",
        help="how long to retry an unreachable or full verifier (default: %(default)s)",
    )
    add_connection_arguments(parser)
    return group


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("security").add_argument
    add("--tls", action="store_true", help="use TLS and trust the system's roots")
    add(
        "--tls-ca",
        type=Path,
        default=os.environ.get("PACELINE_TLS_CA") or None,
        metavar="PEM",
        help="use TLS and trust these roots (or set PACELINE_TLS_CA)",
    )
    add("--tls-cert", type=Path, metavar="PEM", help="certificate of the client, for mTLS")
    add("--tls-key", type=Path, metavar="PEM", help="private key of --tls-cert")
    add("--tls-server-name", metavar="NAME", help="name that the server's certificate must have")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the bearer token (or set PACELINE_TOKEN or PACELINE_TOKEN_FILE)",
    )


def tls_of(args: argparse.Namespace) -> TlsOptions | None:
    """Return TLS options from the arguments; None for a plain connection. Raises CommandError if an
    option of TLS has no effect on it."""
    if not (args.tls or args.tls_ca or args.tls_cert or args.tls_key):
        refuse_options(args, "without --tls or --tls-ca", ("tls_server_name",))
        return None
    return TlsOptions(
        ca=args.tls_ca, cert=args.tls_cert, key=args.tls_key, server_name=args.tls_server_name
    )


def client_of(args: argparse.Namespace, **options: Any) -> Client:
    """Return a client of the verifier in the arguments of `add_service_arguments`; `options` are
    more arguments of `Client`. Raises OptionsError if the token file cannot be read or is empty,
    InvalidRequestError if a TLS file cannot be, or a token would be sent without TLS."""
    return Client(
        args.verifier_address,
        token=read_token(args.token_file),
        tls=tls_of(args),
        retry=RetryOptions(budget=args.retry_seconds),
        **options,
    )


def add_health_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "addresses",
        nargs="*",
        metavar="ADDRESS",
        help="address of a verifier or drafter: host:port or unix:/path (default: the verifier at "
        f"{verifier_address()}, and what `paceline serve` runs beside it)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=5.0,
        metavar="S",
        help="how long to wait for an answer (default: %(default)s)",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="S",
        help="how long to wait for a service that is starting (default: do not wait)",
    )
    add_connection_arguments(parser)


def run_health(args: argparse.Namespace) -> int:
    """Print each status; 0 if all serve, 1 if one drains or is unreachable, 2 for bad arguments."""
    end = time.monotonic() + args.wait
    if args.addresses:
        return max([_health(args, address, end) for address in args.addresses])
    verifier = verifier_address()
    code = _health(args, verifier, end)
    with waiting(lambda: "waiting for the other services"):
        while (noted := noted_services(verifier)) and not noted.ready and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
    others = noted.services[1:] if noted else ()
    return max([code, *(_health(args, address, end) for address in others)])


def _health(args: argparse.Namespace, address: str, end: float) -> int:
    """Return the same for one address, waiting until the time `end` of the monotonic clock, or
    until `paceline serve` of this machine has ended, or says that it runs nothing there."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from paceline.cli.service_process import FAILURE_FILE

    async def check() -> health_pb2.HealthCheckResponse:
        async with Connections(tls=tls_of(args)).channel(address, "") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return await stub.Check(health_pb2.HealthCheckRequest(), timeout=args.timeout)

    async def check_until_it_serves() -> health_pb2.HealthCheckResponse:
        started = False
        while True:
            late = time.monotonic() >= end
            noted = noted_services(address) or noted_services(verifier_address())
            try:
                answer = await check()
                if late or answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return answer
            except grpc.aio.AioRpcError as error:
                if late or error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                if noted is not None and address == noted.unused:
                    raise CommandError(
                        f"{address}: `paceline serve` runs no drafter service here: its verifier "
                        "drafts by itself",
                        1,
                    ) from None
            if started and noted is None:
                raise CommandError(f"{address}: `paceline serve` has ended: it said why", 1)
            started = noted is not None and address in noted.services
            await asyncio.sleep(_POLL_SECONDS)

    try:
        with exit_with(2, InvalidRequestError), waiting(lambda: f"waiting for {address}"):
            answer = asyncio.run(check_until_it_serves())
    except grpc.aio.AioRpcError as error:
        why = f"{error.code().name}: {error.details()}"
        with suppress(OSError):
            why = f"it does not start: {FAILURE_FILE.read_text(encoding='utf-8').strip()}"
        raise CommandError(f"{address}: {why}", 1) from error
    print(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1
