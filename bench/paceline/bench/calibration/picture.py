"""Reliability diagrams as SVG."""

from collections.abc import Mapping, Sequence
from html import escape

from paceline.bench.calibration.fit import BINS, Bin

_SIDE, _GAP, _LEFT, _TOP, _LEGEND = 220, 50, 44, 34, 46
_COLOURS = ("#b0413e", "#2a6f97")


def diagram(panels: Mapping[str, Mapping[str, Sequence[Bin]]]) -> str:
    """One panel a name; in it, each curve's found share by predicted chance.

    Dots lie on the diagonal where confidences mean what they say. Their areas grow with the number
    of paths.
    """
    width = _LEFT + len(panels) * (_SIDE + _GAP)
    height = _TOP + _SIDE + _LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, (title, curves) in enumerate(panels.items()):
        left = _LEFT + index * (_SIDE + _GAP)
        parts.append(f'<g transform="translate({left} {_TOP})">')
        parts += _axes(title)
        for colour, (name, bins) in zip(_COLOURS, curves.items(), strict=False):
            parts += _curve(bins, colour)
            row = list(curves).index(name)
            parts.append(
                f'<text x="{row * _SIDE / 2:.0f}" y="{_SIDE + 38}" fill="{colour}">'
                f"{escape(name)}</text>"
            )
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(title: str) -> list[str]:
    parts = [
        f'<text x="0" y="-12" font-size="13">{escape(title)}</text>',
        f'<rect width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#888"/>',
        f'<line x1="0" y1="{_SIDE}" x2="{_SIDE}" y2="0" stroke="#bbb" stroke-dasharray="4 3"/>',
    ]
    for tick in (0, 0.5, 1):
        at = tick * _SIDE
        parts.append(
            f'<text x="{at:.0f}" y="{_SIDE + 14}" text-anchor="middle">{tick:g}</text>'
            f'<text x="-6" y="{_SIDE - at + 4:.0f}" text-anchor="end">{tick:g}</text>'
        )
    parts.append(
        f'<text x="{_SIDE / 2}" y="{_SIDE + 26}" text-anchor="middle">predicted chance</text>'
        f'<text transform="translate(-26 {_SIDE / 2}) rotate(-90)" text-anchor="middle">'
        "share that stood</text>"
    )
    return parts


def _curve(bins: Sequence[Bin], colour: str) -> list[str]:
    total = sum(each.count for each in bins)
    points = [(each.predicted * _SIDE, (1 - each.found) * _SIDE) for each in bins]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{1.5 + 3 * (each.count * BINS / total) ** 0.5:.1f}" '
        f'fill="{colour}" fill-opacity="0.55"/>'
        for (x, y), each in zip(points, bins, strict=True)
    ]
    return [f'<polyline points="{line}" fill="none" stroke="{colour}"/>', *dots]
