"""`paceline health`: health of a service, for scripts and container probes."""

import argparse
from typing import cast

import grpc

from paceline.cli.connection import add_connection_arguments, open_channel
from paceline.cli.errors import CommandError, exit_with
from paceline.client import InvalidRequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add address, timeout and TLS."""
    parser.add_argument("address", help="of a verifier or drafter: host:port or unix:/path")
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="S", help="default: %(default)s"
    )
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the status; 0 if serving, 1 if draining or unreachable, 2 for bad arguments."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    try:
        with exit_with(2, InvalidRequestError), open_channel(args.address, args) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=args.timeout
            )
    except grpc.RpcError as error:
        call = cast(grpc.Call, error)  # a failed blocking call is its own error
        raise CommandError(f"{args.address}: {call.code().name}: {call.details()}", 1) from error
    print(f"{args.address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1
