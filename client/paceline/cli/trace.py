"""`paceline trace`: where the time of one generation's rounds goes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.command import HTML_WIDTH, CommandError, exit_with, write_html
from paceline.cli.generate import (
    add_client_arguments,
    add_generation_arguments,
    generation_arguments,
    new_client,
)
from paceline.cli.service_process import run_async
from paceline.client import GenerationResult, PacelineError, Stats
from paceline.service.options import OptionsError
from paceline.telemetry.exporters import traced
from paceline.telemetry.names import Attribute, Span


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
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Show the rounds; fails with code 1 when a service failed, 2 for bad arguments."""
    if (args.prompt is None) == (args.read is None):
        raise CommandError("give either a prompt or --read FILE")
    with exit_with(2, OptionsError, OSError, ValueError), exit_with(1, PacelineError):
        if args.read is None:
            with traced("paceline-client"):
                rows = rows_of_stats(_generate(args).stats)
        else:
            rows = rows_of_spans(read_spans(args.read))
        title = f"{len(rows)} prefills and rounds, {sum(row.emitted for row in rows)} tokens"
        if args.html is not None:
            write_html(args.html, to_table(rows, title, HTML_WIDTH))
    console = Console(highlight=False)
    console.print(to_table(rows, title, console.width))
    return 0


def _generate(args: argparse.Namespace) -> GenerationResult:
    client = new_client(args)
    generation = client.generate(args.prompt, **generation_arguments(args))

    async def result() -> GenerationResult:
        async with client:
            return await generation

    return run_async(result())


PARTS = {"draft": "green", "transport": "bright_black", "queue": "yellow", "verify": "blue"}
"""Parts of a round's time, and their colours. In a bar each is drawn with its first letter."""
_COLUMNS = 63
"""Width of all columns but the bar."""
_MIN_BAR, _MAX_BAR = 16, 56


@dataclass(frozen=True)
class Recorded:
    """A span. Times in nanoseconds since 1970."""

    name: str
    trace: str
    span: str
    parent: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A prefill or a round. Times in milliseconds."""

    label: str
    begins: float
    """Start, relative to that of the generation."""
    parts: tuple[tuple[str, float], ...]
    """In order: one of PARTS or "other", and its time."""
    drafted: int
    accepted: int
    emitted: int
    undrafted: str = ""
    """Why there was no tree; empty with one, and for a prefill."""

    @property
    def total(self) -> float:
        return sum(length for _, length in self.parts)

    def spent(self, part: str) -> float:
        """Time of one part."""
        return sum(length for name, length in self.parts if name == part)


def read_spans(file: Path) -> list[Recorded]:
    """Reads spans from a file of OTLP JSON, one export a line, as collectors write it.

    Raises:
        OSError: The file cannot be read.
        ValueError: Its content is not OTLP JSON.
    """
    spans: list[Recorded] = []
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            exported = json.loads(line) if line.strip() else {}
            for resource in exported.get("resourceSpans", ()):
                for scope in resource["scopeSpans"]:
                    spans += [_from_otlp(span) for span in scope["spans"]]
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} has no spans as lines of OTLP JSON: {error!r}") from error
    return spans


def rows_of_spans(spans: Iterable[Recorded]) -> list[Row]:
    """The prefills and rounds of the newest generation, in order.

    Raises:
        ValueError: The spans include no generation.
    """
    spans = list(spans)
    roots = [span for span in spans if span.name.split(" ")[0] in (Span.GENERATION, Span.CHAT)]
    if not roots:
        raise ValueError("no generation among the spans: only one that has ended is traced")
    root = max(roots, key=lambda span: span.began_ns)
    children: dict[str, list[Recorded]] = {}
    for span in sorted(spans, key=lambda span: span.began_ns):
        if span.trace == root.trace:
            children.setdefault(span.parent, []).append(span)
    rows = []
    for span in children.get(root.span, []):
        if span.name == Span.PREFILL:
            rows.append(_row(root, span, "prefill", [span], children))
        elif span.name == Span.ROUND:
            label = str(span.attributes.get(Attribute.ROUND_INDEX, "cut short"))
            calls = [
                each
                for each in children.get(span.span, [])
                if each.name in (Span.DRAFT, Span.VERIFY)
            ]
            rows.append(_row(root, span, label, calls, children))
    return rows


def rows_of_stats(stats: Stats) -> list[Row]:
    """The prefill and the rounds of a generation, from the times that the verifier measured."""
    rows = [Row("prefill", 0.0, _timed(stats.first_token_ms, 0.0, 0.0, stats.prefill_ms), 0, 0, 1)]
    now = stats.first_token_ms
    for index, entry in enumerate(stats.rounds, 1):
        parts = _timed(entry.round_ms, entry.draft_ms, entry.queue_ms, entry.verify_ms)
        label = str(index) if entry.steps == 1 else f"{index} x{entry.steps}"
        counts = entry.drafted, entry.accepted, entry.emitted
        rows.append(Row(label, now, parts, *counts, entry.undrafted or ""))
        now += entry.round_ms
    return rows


def to_table(rows: Sequence[Row], title: str, width: int) -> Table:
    """The rows as a table of so many columns, 80 at least."""
    parts = ", ".join(f"{name[0]} {name}" for name in PARTS)
    legend = f"{parts}; times in ms; xN: N steps"
    shown = Table(
        *("round", "at", "", "ms", "draft", "transp", "queue", "verify", "accepted", "out"),
        title=title,
        title_justify="left",
        caption=legend,
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for column in shown.columns:
        column.justify, column.no_wrap = "right", True
    shown.columns[2].justify = "left"
    bar_width = max(_MIN_BAR, min(_MAX_BAR, width - _COLUMNS))
    longest = max((row.total for row in rows), default=1.0) or 1.0
    for row in rows:
        bar = Text()
        for name, length in _widths(row, longest, bar_width):
            bar.append((name[0] if name in PARTS else ".") * length, PARTS.get(name, ""))
        times = (f"{time:.1f}" for time in (row.total, *map(row.spent, PARTS)))
        accepted = f"{row.accepted}/{row.drafted}" if row.drafted else row.undrafted or "-"
        shown.add_row(row.label, f"{row.begins:.0f}", bar, *times, accepted, str(row.emitted))
    return shown


def _timed(
    total: float, draft: float, queue: float, verify: float
) -> tuple[tuple[str, float], ...]:
    """Parts of a round of which only times are known; the rest of it is transport."""
    rest = max(0.0, total - draft - queue - verify)
    parts = (("draft", draft), ("transport", rest), ("queue", queue), ("verify", verify))
    return tuple((name, length) for name, length in parts if length > 0)


def _row(
    root: Recorded,
    span: Recorded,
    label: str,
    calls: Sequence[Recorded],
    children: dict[str, list[Recorded]],
) -> Row:
    parts: list[tuple[str, float]] = []
    now = span.began_ns
    for call in calls:
        parts.append(("other", max(0, call.began_ns - now) / 1e6))
        parts += _call(call, children.get(call.span, []))
        now = call.ended_ns
    parts.append(("other", max(0, span.ended_ns - now) / 1e6))
    facts = span.attributes
    return Row(
        label,
        (span.began_ns - root.began_ns) / 1e6,
        tuple((name, length) for name, length in parts if length > 0),
        facts.get(Attribute.NUM_DRAFT_TOKENS, 0),
        facts.get(Attribute.NUM_ACCEPTED, 0),
        facts.get(Attribute.NUM_EMITTED, 1 if label == "prefill" else 0),
        facts.get(Attribute.NO_DRAFT, ""),
    )


def _call(call: Recorded, served: Sequence[Recorded]) -> Iterator[tuple[str, float]]:
    """Transport to the service, queueing, computing, transport back.

    Without the service's own span, both directions of transport get half of its time.
    """
    total = (call.ended_ns - call.began_ns) / 1e6
    queue = min(total, call.attributes.get(Attribute.QUEUE_DURATION, 0) * 1e3)
    work = min(total - queue, call.attributes.get(Attribute.COMPUTE_DURATION, 0) * 1e3)
    transport = total - queue - work
    there = transport / 2
    if served:
        there = min(transport, max(0.0, (served[0].began_ns - call.began_ns) / 1e6))
    yield "transport", there
    yield "queue", queue
    yield "draft" if call.name == Span.DRAFT else "verify", work
    yield "transport", transport - there


def _widths(row: Row, longest: float, bar: int) -> Iterator[tuple[str, int]]:
    """Columns of each part. Ends are rounded, not widths, so that errors do not add up."""
    passed, drawn = 0.0, 0
    for name, length in row.parts:
        passed += length
        end = round(passed / longest * bar)
        yield name, end - drawn
        drawn = end


def _from_otlp(span: dict[str, Any]) -> Recorded:
    return Recorded(
        name=span["name"],
        trace=span["traceId"],
        span=span["spanId"],
        parent=span.get("parentSpanId", ""),
        began_ns=int(span["startTimeUnixNano"]),
        ended_ns=int(span["endTimeUnixNano"]),
        attributes={pair["key"]: _value(pair["value"]) for pair in span.get("attributes", ())},
    )


def _value(value: dict[str, Any]) -> Any:
    """OTLP JSON writes 64-bit integers as strings."""
    ((kind, content),) = value.items()
    return int(content) if kind == "intValue" else content
