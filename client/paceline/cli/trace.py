"""`paceline trace`: where the time of one generation's rounds goes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.cli import waterfall
from paceline.cli.connection import add_service_arguments, client_of
from paceline.cli.errors import CommandError, exit_with
from paceline.cli.generate import add_generation_arguments, generation_arguments
from paceline.cli.service_process import run_async
from paceline.cli.tables import write_html
from paceline.client import Client, Generation, GenerationResult, PacelineError
from paceline.service.options import OptionsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the prompt or the file of spans, and the output."""
    parser.add_argument("prompt", nargs="?", help="text to continue")
    parser.add_argument(
        "--read",
        type=Path,
        metavar="FILE",
        help="show the newest generation in this file of spans instead: OTLP JSON, as written by "
        "the file exporter of a collector",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write an HTML page")
    add_generation_arguments(parser)
    add_service_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Show the rounds; fails with code 1 when a service failed, 2 for bad arguments."""
    if (args.prompt is None) == (args.read is None):
        raise CommandError("give either a prompt or --read FILE")
    with exit_with(2, OptionsError, OSError, ValueError), exit_with(1, PacelineError):
        spans = _generate(args) if args.read is None else waterfall.read_spans(args.read)
        rows = waterfall.rows(spans)
        title = f"{len(rows)} prefills and rounds, {sum(row.emitted for row in rows)} tokens"
        table = waterfall.table(rows, title)
        if args.html is not None:
            write_html(args.html, table)
    Console().print(table)
    return 0


def _generate(args: argparse.Namespace) -> list[waterfall.Recorded]:
    """Generate, and return the spans of this process: the services need not export any."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    client = client_of(args)
    run_async(_result(client, client.generate(args.prompt, **generation_arguments(args))))
    return _recorded(exporter.get_finished_spans())


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
