"""`paceline gateway`: OpenAI's HTTP interface to running services."""

from __future__ import annotations

import argparse
import resource
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.connection import add_service_arguments, client_of
from paceline.cli.service_process import (
    add_log_arguments,
    add_readiness_arguments,
    ready_writer,
    refuse,
    run_async,
    stop_with_stdin,
)
from paceline.cli.units import byte_count
from paceline.client import PacelineError, RetryOptions
from paceline.service.logs import configure_logging
from paceline.service.options import OptionsError, add_metrics_arguments, read_secret
from paceline.telemetry.exporters import traced

if TYPE_CHECKING:
    from paceline.gateway import GatewayOptions

GATEWAY_ADDRESS = "127.0.0.1:8080"
KEY_VARIABLE = "PACELINE_API_KEY"
KEY_FILE_VARIABLE = "PACELINE_API_KEY_FILE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the HTTP server, its security, and the services."""
    add = parser.add_argument
    add(
        "--address",
        default=GATEWAY_ADDRESS,
        metavar="HOST:PORT",
        help="where to listen; also unix:/path (default: %(default)s)",
    )
    add("--model-name", metavar="NAME", help="model name in requests (default: its folder)")
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja template instead of that of the tokenizer",
    )
    add(
        "--max-body",
        type=byte_count,
        default=4 << 20,
        metavar="SIZE",
        help="longest request body, such as 512KiB (default: 4MiB)",
    )
    add(
        "--max-requests",
        type=int,
        default=256,
        metavar="N",
        help="requests in flight; more get HTTP 429 (default: %(default)s)",
    )
    add(
        "--strict",
        action="store_true",
        help="refuse unknown fields of requests instead of a warning in a header",
    )
    add(
        "--access-log",
        action="store_true",
        help="log a line for each request",
    )
    add(
        "--keep-alive-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="time without a token after which a stream gets a comment (default: %(default)s)",
    )
    add(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="how long requests may continue after SIGTERM (default: %(default)s)",
    )
    add_readiness_arguments(parser)

    add = parser.add_argument_group("HTTP security").add_argument
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"file with the key that requests must carry as a bearer token (or set {KEY_VARIABLE} "
        f"or {KEY_FILE_VARIABLE})",
    )
    add(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="JSON file with more keys, each with limits of its own",
    )
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin of pages that may send requests from a browser, or * (can be repeated)",
    )
    add("--http-tls-cert", type=Path, metavar="PEM", help="serve HTTPS with this certificate")
    add("--http-tls-key", type=Path, metavar="PEM", help="private key of --http-tls-cert")
    add(
        "--insecure",
        action="store_true",
        help="listen beyond this machine without TLS or key: behind a proxy that has both",
    )
    add_metrics_arguments(parser)
    add_service_arguments(parser).add_argument(
        "--retry-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="how long to retry an unreachable or full verifier (default: %(default)s)",
    )
    add_log_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; 0 after a drain, 2 for options that cannot be served."""
    from paceline.gateway import GatewayOptions, read_keys

    configure_logging(args.log_format, args.log_level)
    with traced("paceline-gateway"):
        try:
            template = args.chat_template and args.chat_template.read_text(encoding="utf-8")
            options = GatewayOptions(
                address=args.address,
                tls_cert=args.http_tls_cert,
                tls_key=args.http_tls_key,
                api_key=read_secret("API key", args.api_key_file, KEY_VARIABLE, KEY_FILE_VARIABLE),
                api_keys=read_keys(args.api_keys) if args.api_keys is not None else (),
                strict=args.strict,
                access_log=args.access_log,
                cors_origins=tuple(args.cors_origin),
                keep_alive_seconds=args.keep_alive_seconds,
                insecure=args.insecure,
                model_name=args.model_name,
                chat_template=template,
                max_body_bytes=args.max_body,
                max_requests=args.max_requests,
                drain_seconds=args.drain_seconds,
                metrics_address=args.metrics_address,
                insecure_metrics=args.insecure_metrics,
            )
            if args.stop_with_stdin:
                stop_with_stdin()
            _raise_file_limit()
            run_async(_serve(args, options))
        except (OptionsError, PacelineError, ValueError, OSError) as error:
            return refuse(error)
    return 0


def _raise_file_limit() -> None:
    """Allow as many connections as the system does: each is an open file, often 1024 at most."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS does not accept its own limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(args: argparse.Namespace, options: GatewayOptions) -> None:
    from paceline.gateway import run_gateway

    async with client_of(args, retry=RetryOptions(budget=args.retry_seconds)) as client:
        await run_gateway(client, options, on_ready=ready_writer(args))
