"""A picture of the table: bars by category, and speed by length of the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log2
from statistics import median

from paceline.bench.table.engines import NONE
from paceline.bench.table.figures import GREEDY, MANY, OURS, RIVALS, Cell, best

_WIDTH, _HEIGHT, _MARGIN, _BAR = 560, 260, 50, 14  # of a panel, and of a bar, in pixels
_COLORS = ("#1f5fa8", "#9fc0e6", "#c8571b", "#8a3fa0", "#5b6770")
_NAMES = ("Paceline, best drafter", "Paceline, no drafter", *(f"{name}, best" for name in RIVALS))


def draw(cells: Mapping[str, Cell]) -> str:
    """An SVG of greedy decoding. Whiskers are 95% intervals."""
    shown = {
        title.replace(GREEDY, "").replace(MANY, ", 8 users"): cell
        for title, cell in cells.items()
        if title.endswith((GREEDY, MANY))
    }
    panels = [("tokens/s by category", list(_bars(shown)))]
    if "long" in shown:
        panels.append(("tokens/s by tokens of the prompt (long)", list(_curves(shown["long"]))))
    width, height = len(panels) * (_WIDTH + _MARGIN) + _MARGIN, _HEIGHT + 2 * _MARGIN + 30
    size = f'viewBox="0 0 {width} {height}" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">']
    parts.append('<rect width="100%" height="100%" fill="#fff"/>')
    for place, (title, lines) in enumerate(panels):
        parts.append(f'<g transform="translate({_MARGIN + place * (_WIDTH + _MARGIN)} {_MARGIN})">')
        parts += [f'<text y="-18">{title}</text>', *lines, "</g>"]
    for place, (name, color) in enumerate(zip(_NAMES, _COLORS, strict=True)):
        x, y = _MARGIN + 180 * place, height - 14
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _contestants(cell: Cell) -> list[str | None]:
    """One contestant for each color."""
    drafted = best(cell, OURS, drafted=True)
    plain = " ".join([*drafted.split()[:2], NONE]) if drafted else best(cell, OURS)
    return [drafted, plain if plain in cell else None, *(best(cell, name) for name in RIVALS)]


def _bars(cells: Mapping[str, Cell]) -> Iterator[str]:
    found = {
        title: [name and cell[name]["figures"]["tokens_per_second"] for name in _contestants(cell)]
        for title, cell in cells.items()
    }
    top = max((rate[2] for row in found.values() for rate in row if rate), default=1.0)
    yield from _grid(top)
    for place, (title, row) in enumerate(found.items()):
        left = _WIDTH / len(found) * place + 8
        for number, (rate, color) in enumerate(zip(row, _COLORS, strict=True)):
            if rate:
                low, middle, high = (_HEIGHT * (1 - each / top) for each in rate)
                x = left + number * (_BAR + 1)
                box = f'x="{x:.0f}" y="{middle:.1f}" width="{_BAR}" height="{_HEIGHT - middle:.1f}"'
                yield f'<rect {box} fill="{color}"/>'
                yield f'<path d="M{x + _BAR / 2:.1f} {low:.1f}V{high:.1f}" stroke="#000"/>'
        yield f'<text x="{left:.0f}" y="{_HEIGHT + 16}">{title}</text>'


def _curves(cell: Cell) -> Iterator[str]:
    lines = [_line(cell, name) if name else {} for name in _contestants(cell)]
    lengths = sorted({length for line in lines for length in line})
    top = max((rate for line in lines for rate in line.values()), default=1.0)
    yield from _grid(top)
    right = _WIDTH / max(1.0, log2(lengths[-1] / lengths[0])) if lengths else 0.0
    for length in lengths:
        x = right * log2(length / lengths[0])
        yield f'<text x="{x:.0f}" y="{_HEIGHT + 16}" text-anchor="middle">{length}</text>'
    for line, color in zip(lines, _COLORS, strict=True):
        points = " ".join(
            f"{right * log2(length / lengths[0]):.1f},{_HEIGHT * (1 - rate / top):.1f}"
            for length, rate in sorted(line.items())
        )
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'


def _line(cell: Cell, name: str) -> dict[int, float]:
    """Median rates by length of the prompt, in steps of 1,000 tokens."""
    rates: dict[int, list[float]] = {}
    for each in cell[name]["samples"].values():
        if each["rate"]:
            rates.setdefault(max(1, round(each["prompt_tokens"] / 1000)) * 1000, []).append(
                each["rate"]
            )
    return {length: median(found) for length, found in rates.items()}


def _grid(top: float) -> Iterator[str]:
    """Horizontal lines at quarters of the highest value."""
    for quarter in range(5):
        y = _HEIGHT * (1 - quarter / 4)
        yield f'<path d="M0 {y:.0f}h{_WIDTH}" stroke="#ddd"/>'
        yield f'<text x="-6" y="{y + 4:.0f}" text-anchor="end">{top * quarter / 4:.0f}</text>'
