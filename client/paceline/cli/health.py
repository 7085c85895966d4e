"""`paceline health`: whether a service answers and serves, for scripts and container probes."""

import argparse
import sys
from typing import cast

import grpc

from paceline.cli.connection import add_connection_arguments, open_channel
from paceline.service.options import OptionsError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the address, how long to wait, and TLS."""
    parser.add_argument("address", help="of a verifier or drafter: host:port or unix:/path")
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="S", help="default: %(default)s"
    )
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Ask; 0 when it serves, 1 when it drains or does not answer, 2 for bad arguments."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    try:
        with open_channel(args.address, args) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=args.timeout
            )
    except OptionsError as error:
        print(f"paceline health: {error}", file=sys.stderr)
        return 2
    except grpc.RpcError as error:
        failure = cast(grpc.Call, error)  # the error of a blocking call is the call too
        print(f"{args.address}: {failure.code().name}: {failure.details()}", file=sys.stderr)
        return 1
    print(f"{args.address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1
