"""How client commands reach a service: address, TLS and token.

Environment variables stand in for arguments that are not given, so that a deployment names its
services once: `PACELINE_VERIFIER_ADDRESS`, `PACELINE_DRAFTER_ADDRESS`, `PACELINE_TLS_CA`, and
`PACELINE_TOKEN` or `PACELINE_TOKEN_FILE`.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import grpc

from paceline.client import TlsOptions
from paceline.service.options import OptionsError, read_token


def verifier_address() -> str:
    """Where the verifier is, if no argument says."""
    return os.environ.get("PACELINE_VERIFIER_ADDRESS") or "127.0.0.1:7431"


def drafter_address() -> str:
    """Where the drafter is, if no argument says."""
    return os.environ.get("PACELINE_DRAFTER_ADDRESS") or "127.0.0.1:7432"


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the TLS and token arguments of a client."""
    group = parser.add_argument_group("security")
    group.add_argument("--tls", action="store_true", help="speak TLS, trusting the system's roots")
    group.add_argument(
        "--tls-ca",
        type=Path,
        default=os.environ.get("PACELINE_TLS_CA") or None,
        metavar="PEM",
        help="speak TLS, trusting these roots (or set PACELINE_TLS_CA)",
    )
    group.add_argument("--tls-cert", type=Path, metavar="PEM", help="own certificate, for mTLS")
    group.add_argument("--tls-key", type=Path, metavar="PEM", help="private key of --tls-cert")
    group.add_argument(
        "--tls-server-name", metavar="NAME", help="name to expect in the server's certificate"
    )
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the bearer token (or set PACELINE_TOKEN or PACELINE_TOKEN_FILE)",
    )


def tls_of(args: argparse.Namespace) -> TlsOptions | None:
    """TLS as the arguments ask for it; None for a plain connection."""
    if not (args.tls or args.tls_ca or args.tls_cert or args.tls_key):
        return None
    return TlsOptions(
        ca=args.tls_ca, cert=args.tls_cert, key=args.tls_key, server_name=args.tls_server_name
    )


def token_of(args: argparse.Namespace) -> str | None:
    """The token, from its file or the environment.

    Raises:
        OptionsError: if the file cannot be read or is empty.
    """
    return read_token(args.token_file)


def metadata_of(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """What every call carries."""
    token = token_of(args)
    return (("authorization", f"Bearer {token}"),) if token else ()


def open_channel(address: str, args: argparse.Namespace) -> grpc.Channel:
    """A blocking channel, for commands that make a call or two.

    Raises:
        OptionsError: if a TLS file cannot be read.
    """
    tls = tls_of(args)
    if tls is None:
        return grpc.insecure_channel(address)
    options: list[tuple[str, Any]] = []
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    try:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=tls.ca.read_bytes() if tls.ca else None,
            private_key=tls.key.read_bytes() if tls.key else None,
            certificate_chain=tls.cert.read_bytes() if tls.cert else None,
        )
    except OSError as error:
        raise OptionsError(f"cannot read a TLS file: {error}") from error
    return grpc.secure_channel(address, credentials, options=options)
