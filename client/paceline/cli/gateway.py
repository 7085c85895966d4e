"""`paceline gateway`: OpenAI's HTTP interface to running services."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.connection import add_service_arguments, client_of
from paceline.cli.service_process import (
    add_log_arguments,
    add_readiness_arguments,
    raise_file_limit,
    ready_writer,
    refuse,
    run_async,
    stop_with_stdin,
)
from paceline.client import PacelineError
from paceline.service.options import OptionsError, add_options, given_options, read_secret
from paceline.service.runtime import configure_logging
from paceline.telemetry.exporters import traced

if TYPE_CHECKING:
    from paceline.gateway import GatewayOptions

KEY_VARIABLE = "PACELINE_API_KEY"
KEY_FILE_VARIABLE = "PACELINE_API_KEY_FILE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the HTTP server, its security, and the services."""
    from paceline.gateway import GatewayOptions

    group = parser.add_argument_group("gateway")
    add_options(group, GatewayOptions)
    add = group.add_argument
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja template instead of that of the tokenizer",
    )
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"file with the key that requests must carry as a bearer token (or set {KEY_VARIABLE} "
        f"or {KEY_FILE_VARIABLE})",
    )
    add_readiness_arguments(parser)
    add_service_arguments(parser)
    add_log_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; 0 after a drain, 2 for options that cannot be served."""
    from paceline.gateway import GatewayOptions

    configure_logging(args.log_format, args.log_level)
    with traced("paceline-gateway"):
        try:
            options = GatewayOptions(
                api_key=read_secret("API key", args.api_key_file, KEY_VARIABLE, KEY_FILE_VARIABLE),
                chat_template=args.chat_template and args.chat_template.read_text(encoding="utf-8"),
                **given_options(args, GatewayOptions),
            )
            if args.stop_with_stdin:
                stop_with_stdin()
            raise_file_limit()
            run_async(_serve(args, options))
        except (OptionsError, PacelineError, ValueError, OSError) as error:
            return refuse(error)
    return 0


async def _serve(args: argparse.Namespace, options: GatewayOptions) -> None:
    from paceline.gateway import run_gateway

    async with client_of(args) as client:
        await run_gateway(client, options, on_ready=ready_writer(args))
