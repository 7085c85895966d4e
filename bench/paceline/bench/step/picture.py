"""A picture of step times: a panel for each context, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor, log2

_WIDTH, _HEIGHT, _MARGIN, _LINE = 300, 260, 50, 17  # of a panel and of a line of text, in pixels
_COLORS = ("#1f5fa8", "#c8571b", "#2f8a4b", "#8a3fa0", "#b8860b", "#5b6770", "#c2255c", "#0b7a75")

Times = dict[str, dict[int, float]]  # milliseconds by engine and rows


def draw(contexts: dict[str, Times]) -> str:
    """An SVG of the times at each context; those of rooflines are dashed."""
    engines = list(dict.fromkeys(engine for times in contexts.values() for engine in times))
    width, top = len(contexts) * (_WIDTH + _MARGIN) + _MARGIN, _HEIGHT + 2 * _MARGIN
    size = f'viewBox="0 0 {width} {top + _LINE * len(engines)}" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">']
    parts.append('<rect width="100%" height="100%" fill="#fff"/>')
    for place, (context, times) in enumerate(contexts.items()):
        parts.append(f'<g transform="translate({_MARGIN + place * (_WIDTH + _MARGIN)} {_MARGIN})">')
        parts.append(f'<text y="-12">ms by rows, after {context} tokens</text>')
        parts += [*_panel(times, engines), "</g>"]
    for place, engine in enumerate(engines):
        y = top + _LINE * place
        parts.append(f'<path d="M{_MARGIN} {y - 4}h30" {_stroke(engine, engines)}/>')
        parts.append(f'<text x="{_MARGIN + 40}" y="{y}">{engine}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(times: Times, engines: Sequence[str]) -> Iterator[str]:
    rows = sorted({count for line in times.values() for count in line})
    values = [ms for line in times.values() for ms in line.values()]
    low, high = floor(log2(min(values))), ceil(log2(max(values)))
    right, up = _WIDTH / max(1.0, log2(rows[-1] / rows[0])), _HEIGHT / max(1, high - low)
    for power in range(low, high + 1):
        y = up * (high - power)
        yield f'<path d="M0 {y:.0f}h{_WIDTH}" stroke="#ddd"/>'
        yield f'<text x="-6" y="{y + 4:.0f}" text-anchor="end">{2.0**power:g}</text>'
    for count in rows:
        x = right * log2(count / rows[0])
        yield f'<text x="{x:.0f}" y="{_HEIGHT + 16}" text-anchor="middle">{count}</text>'
    for engine, line in times.items():
        points = ((right * log2(n / rows[0]), up * (high - log2(ms))) for n, ms in line.items())
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" {_stroke(engine, engines)}/>'


def _stroke(engine: str, engines: Sequence[str]) -> str:
    dashes = 'stroke-dasharray="4"' if engine.startswith("roofline") else 'stroke-width="2"'
    place = engines.index(engine.replace("roofline", "paceline"))  # both in one colour
    return f'stroke="{_COLORS[place % len(_COLORS)]}" {dashes}'
