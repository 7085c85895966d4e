"""The rounds of one traced generation: where their time went, for terminals and as HTML."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from paceline.telemetry.names import Attribute, Span

PARTS = {"draft": "green", "transport": "bright_black", "queue": "yellow", "verify": "blue"}
"""Where time goes, and in which colour it is shown."""
_HTML_COLOURS = dict(zip(PARTS, ("#3fa55b", "#9aa0a6", "#e0a400", "#3b78d8"), strict=True))
_BAR = 56  # columns


@dataclass(frozen=True)
class Recorded:
    """A span, wherever it was read. Times in nanoseconds since 1970."""

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
    """After the generation's begin."""
    parts: tuple[tuple[str, float], ...]
    """What it did, in order: one of PARTS, or "client", and how long."""
    drafted: int
    accepted: int
    emitted: int

    @property
    def total(self) -> float:
        return sum(length for _, length in self.parts)

    def spent(self, part: str) -> float:
        """Time in one of its parts."""
        return sum(length for name, length in self.parts if name == part)


def read_spans(file: Path) -> list[Recorded]:
    """Spans of a file of OTLP's JSON, one export a line, as collectors write them.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds something else.
    """
    spans: list[Recorded] = []
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            exported = json.loads(line) if line.strip() else {}
            for resource in exported.get("resourceSpans", ()):
                for scope in resource["scopeSpans"]:
                    spans += [_from_otlp(span) for span in scope["spans"]]
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} does not hold spans as lines of OTLP JSON: {error!r}") from error
    return spans


def rows(spans: Iterable[Recorded]) -> list[Row]:
    """The newest generation's prefills and rounds, in order.

    Raises:
        ValueError: There is no generation among the spans.
    """
    spans = list(spans)
    roots = [span for span in spans if span.name.split(" ")[0] == Span.GENERATION]
    if not roots:
        raise ValueError("there is no generation among the spans: was it traced, and to its end?")
    root = max(roots, key=lambda span: span.began_ns)
    children: dict[str, list[Recorded]] = {}
    for span in sorted(spans, key=lambda span: span.began_ns):
        if span.trace == root.trace:
            children.setdefault(span.parent, []).append(span)
    found = []
    for span in children.get(root.span, []):
        if span.name == Span.PREFILL:
            found.append(_row(root, span, "prefill", [span], children))
        elif span.name == Span.ROUND:
            label = str(span.attributes.get(Attribute.ROUND_INDEX, "cut short"))
            found.append(_row(root, span, label, children.get(span.span, []), children))
    return found


def table(found: Sequence[Row], title: str) -> Table:
    """For a terminal."""
    legend = Text.assemble(*((f" █ {name} ", colour) for name, colour in PARTS.items()))
    shown = Table(title=title, title_justify="left", caption=legend)
    shown.add_column("round", justify="right")
    shown.add_column("at ms", justify="right")
    shown.add_column("", min_width=_BAR)
    for heading in ("ms", *PARTS, "accepted", "emitted"):
        shown.add_column(heading, justify="right")
    longest = max((row.total for row in found), default=1.0) or 1.0
    for row in found:
        bar = Text()
        for name, width in _widths(row, longest):
            bar.append("█" * width, PARTS.get(name, "black"))
        shown.add_row(row.label, f"{row.begins:.1f}", bar, f"{row.total:.2f}", *_figures(row))
    return shown


def page(found: Sequence[Row], title: str) -> str:
    """One HTML page that needs nothing else."""
    longest = max((row.total for row in found), default=1.0) or 1.0
    lines = "\n".join(_html_row(row, longest) for row in found)
    legend = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{name}</span>'
        for name, colour in _HTML_COLOURS.items()
    )
    heads = "".join(f"<th>{head}</th>" for head in ("ms", *PARTS, "accepted", "emitted"))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><p>{legend}</p>"
        f'<table><tr><th>round</th><th>at ms</th><th class="bar"></th>{heads}</tr>\n'
        f"{lines}\n</table></html>\n"
    )


_STYLE = """
:root{color-scheme:light dark}body{font:14px system-ui,sans-serif;margin:2em}
table{border-collapse:collapse;width:100%}td,th{padding:2px 8px;text-align:right;
font-variant-numeric:tabular-nums}.bar{width:50%;text-align:left}.bar i{display:inline-block;
height:14px;vertical-align:middle}tr:hover{background:#8882}.key{margin-right:1.5em}
.key i{display:inline-block;width:12px;height:12px;margin-right:5px}
"""


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
        parts.append(("client", max(0, call.began_ns - now) / 1e6))
        parts += _call(call, children.get(call.span, []))
        now = call.ended_ns
    parts.append(("client", max(0, span.ended_ns - now) / 1e6))
    facts = span.attributes
    return Row(
        label,
        (span.began_ns - root.began_ns) / 1e6,
        tuple((name, length) for name, length in parts if length > 0),
        facts.get(Attribute.NUM_DRAFT_TOKENS, 0),
        facts.get(Attribute.NUM_ACCEPTED, 0),
        facts.get(Attribute.NUM_EMITTED, 1 if label == "prefill" else 0),
    )


def _call(call: Recorded, served: Sequence[Recorded]) -> Iterator[tuple[str, float]]:
    """The way there, the queue, the work, the way back.

    How long the way there took only the service's own span can tell; without one, half of both.
    """
    total = (call.ended_ns - call.began_ns) / 1e6
    queue = min(total, call.attributes.get(Attribute.QUEUE_US, 0) / 1e3)
    work = min(total - queue, call.attributes.get(Attribute.COMPUTE_US, 0) / 1e3)
    ways = total - queue - work
    there = ways / 2
    if served:
        there = min(ways, max(0.0, (served[0].began_ns - call.began_ns) / 1e6))
    yield "transport", there
    yield "queue", queue
    yield "draft" if call.name == Span.DRAFT else "verify", work
    yield "transport", ways - there


def _widths(row: Row, longest: float) -> Iterator[tuple[str, int]]:
    """Columns of each part, such that their ends are where they belong."""
    passed, drawn = 0.0, 0
    for name, length in row.parts:
        passed += length
        end = round(passed / longest * _BAR)
        yield name, end - drawn
        drawn = end


def _figures(row: Row) -> list[str]:
    accepted = f"{row.accepted}/{row.drafted}" if row.drafted else "-"
    return [*(f"{row.spent(part):.2f}" for part in PARTS), accepted, str(row.emitted)]


def _html_row(row: Row, longest: float) -> str:
    bar = "".join(
        f'<i title="{name} {length:.3f} ms" style="width:{100 * length / longest:.3f}%;'
        f'background:{_HTML_COLOURS.get(name, "transparent")}"></i>'
        for name, length in row.parts
    )
    cells = "".join(f"<td>{cell}</td>" for cell in (f"{row.total:.2f}", *_figures(row)))
    label = html.escape(row.label)
    return f'<tr><td>{label}</td><td>{row.begins:.1f}</td><td class="bar">{bar}</td>{cells}</tr>'


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
    """Whole numbers come as text, as JSON has none of 64 bits."""
    ((kind, found),) = value.items()
    return int(found) if kind == "intValue" else found
