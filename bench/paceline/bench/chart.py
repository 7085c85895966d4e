"""An SVG of lines with intervals, one panel a measure, for light and dark pages.

``python -m paceline.bench.chart JSON SVG`` draws the arms of a result file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from math import log2
from pathlib import Path
from typing import Any

Line = Mapping[float, Sequence[float]]
"""By place on the x axis: lower end, value and upper end."""

_WIDTH, _HEIGHT, _MARGIN, _LINE = 300, 200, 56, 17  # of a panel and of a line of text, in pixels
_LABEL = 32  # least distance of two labels of the x axis, in pixels
_COLUMNS = 3
_COLORS = ("#3b82c4", "#d9652b", "#3f9c5a", "#a259b8", "#b8860b", "#7d8790", "#d6457a", "#14958f")
_STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.card { fill: #ffffff } .grid { stroke: #d8dee4 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .card { fill: #0d1117 } .grid { stroke: #30363d }
}
</style>"""


def draw_arms(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """The arms of a result file's entries: a panel a measure, and a line an arm.

    Args:
        entries: Each has a ``panel``, which is named beside the measure, and ``arms``: by name of
            the arm, measure and place on the x axis the lower end, value and upper end.
    """
    panels: dict[str, dict[str, dict[float, Sequence[float]]]] = {}
    for entry in entries.values():
        for arm, measures in entry["arms"].items():
            for measure, line in measures.items():
                title = ", ".join(filter(None, (measure, entry["panel"])))
                drawn = panels.setdefault(title, {}).setdefault(arm, {})
                drawn.update({float(x): ends for x, ends in line.items()})
    return draw(panels)


def draw(panels: Mapping[str, Mapping[str, Line]]) -> str:
    """Lines by name in panels by title; a panel's axes begin at 0 or are logarithmic."""
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    columns = min(_COLUMNS, len(panels))
    across, down = _WIDTH + _MARGIN, _HEIGHT + 2 * _MARGIN
    rows = -(-len(panels) // _COLUMNS)
    width, height = columns * across + _MARGIN, rows * down + _LINE * (len(names) + 1)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">', _STYLE]
    parts.append('<rect class="card" width="100%" height="100%"/>')
    for place, (title, lines) in enumerate(panels.items()):
        x = _MARGIN + place % _COLUMNS * across
        y = _MARGIN + place // _COLUMNS * down
        parts.append(f'<g transform="translate({x} {y})"><text y="-14">{escape(title)}</text>')
        parts += [*_panel(lines, names), "</g>"]
    for place, name in enumerate(names):
        y, color = rows * down + _LINE * place, _COLORS[place % len(_COLORS)]
        dashes = _dashes(place)
        parts.append(f'<path d="M{_MARGIN} {y - 4}h30" stroke="{color}" stroke-width="2"{dashes}/>')
        parts.append(f'<text x="{_MARGIN + 40}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(lines: Mapping[str, Line], names: Sequence[str]) -> Iterator[str]:
    places = sorted({x for line in lines.values() for x in line})
    values = [value for line in lines.values() for ends in line.values() for value in ends]
    across, _ = _scale(places, min(places))
    up, ticks = _scale(values, 0.0)
    for tick in ticks:
        y = _HEIGHT * (1 - up(tick))
        yield f'<path class="grid" d="M0 {y:.1f}h{_WIDTH}"/>'
        yield f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{tick:.3g}</text>'
    free = 0.0
    for x in places:
        left = _WIDTH * across(x)
        if left >= free:
            yield f'<text x="{left:.1f}" y="{_HEIGHT + 18}" text-anchor="middle">{x:g}</text>'
            free = left + _LABEL
    for name, line in lines.items():
        place = names.index(name)
        color = _COLORS[place % len(_COLORS)]
        points = []
        for x, ends in sorted(line.items()):
            left = _WIDTH * across(x)
            low, middle, high = (_HEIGHT * (1 - up(value)) for value in ends)
            points.append(f"{left:.1f},{middle:.1f}")
            yield f'<path d="M{left:.1f} {low:.1f}V{high:.1f}" stroke="{color}" opacity=".5"/>'
            yield f'<circle cx="{left:.1f}" cy="{middle:.1f}" r="3" fill="{color}"/>'
        path = f'points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="2"'
        yield f"<polyline {path}{_dashes(place)}/>"


def _dashes(place: int) -> str:
    return ' stroke-dasharray="5 3"' if place >= len(_COLORS) else ""


def _scale(values: Sequence[float], low: float) -> tuple[Callable[[float], float], list[float]]:
    """The place of a value from 0 to 1, logarithmic over a wide range, and four or five ticks."""
    least, high = min(values), max(values)
    if least > 0 and high / least > 10:
        first, span = log2(least), log2(high / least)
        return lambda value: (log2(value) - first) / span, [
            2 ** (first + span * quarter / 4) for quarter in range(5)
        ]
    span = (high - low) or 1.0
    return lambda value: (value - low) / span, [low + span * quarter / 4 for quarter in range(5)]


if __name__ == "__main__":
    file, picture = map(Path, sys.argv[1:])
    picture.write_text(draw_arms(json.loads(file.read_text())["results"]))
