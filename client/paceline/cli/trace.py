"""`paceline trace`: one generation's rounds, and where their time went."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.cli import waterfall
from paceline.cli.connection import (
    add_connection_arguments,
    drafter_address,
    tls_of,
    token_of,
    verifier_address,
)
from paceline.cli.generate import add_generation_arguments, generation_arguments, run_async
from paceline.client import Client, Generation, GenerationResult, PacelineError
from paceline.service.options import OptionsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to generate, or what to read, and how to show it."""
    parser.add_argument("prompt", nargs="?", help="text to continue")
    parser.add_argument(
        "--read",
        type=Path,
        metavar="FILE",
        help="show the newest generation of this file of spans instead: OTLP JSON, as the file "
        "exporter of a collector writes it",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page of it here too")
    add_generation_arguments(parser)
    services = parser.add_argument_group("services")
    services.add_argument("--verifier-address", default=verifier_address(), metavar="A")
    services.add_argument("--drafter-address", default=drafter_address(), metavar="B")
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Show it; 0 when there was something to show, 1 when a service failed, 2 for bad arguments."""
    try:
        if (args.prompt is None) == (args.read is None):
            raise ValueError("give either a prompt or --read FILE")
        spans = _generate(args) if args.read is None else waterfall.read_spans(args.read)
        found = waterfall.rows(spans)
        title = f"{len(found)} prefills and rounds, {sum(row.emitted for row in found)} tokens"
        if args.html is not None:
            args.html.write_text(waterfall.page(found, title), encoding="utf-8")
    except PacelineError as error:
        return _fail(error, 1)
    except (OptionsError, OSError, ValueError) as error:
        return _fail(error, 2)
    Console().print(waterfall.table(found, title))
    return 0


def _generate(args: argparse.Namespace) -> list[waterfall.Recorded]:
    """Spans of a generation, as this process saw it: the services need not export any."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    kept = InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    client = Client(
        args.verifier_address,
        drafter=args.drafter_address,
        token=token_of(args),
        tls=tls_of(args),
    )
    run_async(_result(client, client.generate(args.prompt, **generation_arguments(args))))
    return _recorded(kept.get_finished_spans())


async def _result(client: Client, generation: Generation) -> GenerationResult:
    async with client:
        return await generation


def _recorded(spans: Sequence[ReadableSpan]) -> list[waterfall.Recorded]:
    return [
        waterfall.Recorded(
            name=span.name,
            trace=f"{span.context.trace_id:032x}",
            span=f"{span.context.span_id:016x}",
            parent="" if span.parent is None else f"{span.parent.span_id:016x}",
            began_ns=span.start_time or 0,
            ended_ns=span.end_time or 0,
            attributes=dict(span.attributes or {}),
        )
        for span in spans
    ]


def _fail(error: Exception, code: int) -> int:
    print(f"paceline trace: {error}", file=sys.stderr)
    return code
