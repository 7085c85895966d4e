"""From samples to figures: medians with intervals, ratios within a prompt, tables, a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from math import log2
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from paceline.bench.table.engines import AHEAD, ALWAYS_END, NONE, Answer, digest

Sample = dict[str, Any]
"""Of one group of requests; see :func:`sample`."""

Cell = dict[str, dict[str, Any]]
"""By contestant, ``samples`` by number of the group, and ``figures``."""

OURS = "paceline"
RIVALS = ("llama.cpp", "openvino", "vllm", "transformers")
GREEDY, MANY = ", T = 0, 1 user", ", T = 0, 8 users"
"""Ends of names of cells."""

_RESAMPLES = 1000

_A_STEP = {"checked_a_step": "checked", "draft_ms": "draft_ms", "step_ms": "verify_ms"}
"""Figures that are means over steps, and the field of a sample that has their total."""

_WIDTH, _HEIGHT, _MARGIN, _BAR = 560, 260, 50, 14  # of a panel, and of a bar, in pixels
_COLORS = ("#1f5fa8", "#9fc0e6")
_RIVALS_COLORS = dict(zip(RIVALS, ("#c8571b", "#8a3fa0", "#2e8b57", "#5b6770"), strict=True))


def sample(answers: Sequence[Answer], prompts: Sequence[list[int]]) -> Sample:
    """One or several requests at a time.

    The rate counts tokens after the first over the time from the first token to the last.
    """
    tokens = sum(answer.tokens for answer in answers)
    seconds = max(each.ended for each in answers) - min(each.first for each in answers)
    return {
        "prompt_tokens": round(median(map(len, prompts))),
        "tokens": tokens,
        "rate": round((tokens - 1) / seconds, 2) if tokens > 1 else None,
        "first_s": round(median(answer.first_seconds for answer in answers), 4),
        "rounds": sum(answer.drafted_rounds for answer in answers),
        "drafted": sum(answer.drafted_tokens for answer in answers),
        "checked": sum(answer.checked for answer in answers),
        "steps": sum(answer.steps for answer in answers),
        "draft_ms": round(sum(answer.draft_ms for answer in answers), 2),
        "verify_ms": round(sum(answer.verify_ms for answer in answers), 2),
        "output": digest("\n".join(answer.output for answer in answers)),
    }


def summarize(cell: Cell) -> None:
    """Fill in the figures of every contestant.

    ``over_better`` compares a drafter with the better of none and a draft in every round,
    ``over_after`` drafting ahead with drafting after the step.
    """
    for name, entry in cell.items():
        samples = entry["samples"]
        figures = {
            "runs": len(samples),
            "tokens": sum(each["tokens"] for each in samples.values()),
            "tokens_per_second": interval(_rates(cell, name).values()),
            "first_token_s": interval(each["first_s"] for each in samples.values()),
        }
        if rounds := sum(each["rounds"] for each in samples.values()):
            figures["accepted_length"] = sum(s["drafted"] for s in samples.values()) / rounds
        if steps := sum(each.get("steps", 0) for each in samples.values()):
            for figure, total in _A_STEP.items():
                found = sum(each.get(total, 0) for each in samples.values())
                figures[figure] = round(found / steps, 3)
        plain = _plain(name)
        if plain in cell and plain != name:
            shared = samples.keys() & cell[plain]["samples"].keys()
            same = [_output(cell, name, each) == _output(cell, plain, each) for each in shared]
            figures |= {"over_none": ratio(cell, name, plain), "same_output": sum(same)}
            figures["compared"] = len(same)
        after = name.removesuffix(AHEAD) + ALWAYS_END
        if name.endswith(AHEAD) and after in cell:
            figures["over_after"] = ratio(cell, name, after)
        entry["figures"] = figures
    for name, entry in cell.items():
        fixed = [each for each in (_plain(name), f"{name}{ALWAYS_END}") if each in cell]
        if name != _plain(name) and len(fixed) == 2 and all(_rates(cell, each) for each in fixed):
            better = max(fixed, key=lambda each: _rate(cell, each))
            entry["figures"]["over_better"] = ratio(cell, name, better)


def interval(values: Any) -> list[float] | None:
    """Lower end, median and upper end: a 95% bootstrap interval of the median.

    Returns None without values.
    """
    found = np.array(list(values))
    if not len(found):
        return None
    draws = np.random.default_rng(1).choice(found, (_RESAMPLES, len(found)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return [round(float(each), 3) for each in (low, np.median(found), high)]


def ratio(cell: Cell, name: str, other: str) -> list[float] | None:
    """The interval of one contestant's rate over another's on the same prompts."""
    ours, theirs = _rates(cell, name), _rates(cell, other)
    return interval(ours[key] / theirs[key] for key in ours.keys() & theirs.keys())


def best(cell: Cell, engine: str, drafted: bool = False) -> str | None:
    """The contestant of an engine with the highest median rate; None if it has none.

    Args:
        cell: With figures.
        engine: Beginning of its name.
        drafted: Only with a drafter, and not one that drafts in every round.
    """
    names = [
        name
        for name, entry in cell.items()
        if name.startswith(engine)
        and entry["figures"]["tokens_per_second"]
        and not (drafted and name.endswith((f" {NONE}", ALWAYS_END, AHEAD)))
    ]
    return max(names, key=lambda name: _rate(cell, name), default=None)


def markdown(cells: Mapping[str, Cell]) -> str:
    """The summary: Paceline's fastest drafter in greedy decoding beside the others at their best.

    The speed relative to plain decoding is within a format of weights, with the fastest drafter
    of each.

    Raises:
        ValueError: No cell has a drafter.
    """
    all_ours = (name for cell in cells.values() for name in cell if name.startswith(OURS))
    formats = list(dict.fromkeys(name.split()[1] for name in all_ours))
    heads = [
        "prompts",
        "fastest drafter",
        "tokens/s",
        *(f"times as fast as plain, {name}" for name in formats),
    ]
    rivals = _rivals(cells.values())
    heads += [f"times as fast as {name}" for name in rivals]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for title, cell in cells.items():
        ours = best(cell, OURS, drafted=True)
        if ours is None or not title.endswith((GREEDY, MANY)):
            continue
        row = [title.replace(GREEDY, "").replace(MANY, ", 8 users"), ours.removeprefix(f"{OURS} ")]
        row.append(f"{_rate(cell, ours):.0f}")
        for name in formats:
            drafted = best(cell, f"{OURS} {name} ", drafted=True)
            row.append(_times(cell, drafted, _plain(drafted)) if drafted else "")
        row += [_times(cell, ours, best(cell, name)) for name in rivals]
        lines.append(f"| {' | '.join(row)} |")
    if len(lines) == 2:
        raise ValueError("the result file has no cell of greedy decoding with a drafter")
    return "\n".join(lines)


def table(title: str, cell: Cell) -> Table:
    """All contestants of a cell."""
    columns = (
        "runs",
        "tokens/s",
        "95% interval",
        "times plain",
        "times the better of plain and always",
        "time to first token, s",
        "accepted length",
        "same output",
    )
    found = Table("", *columns, title=title)
    for name, entry in cell.items():
        figures = entry["figures"]
        rate, over, better, first = (
            figures.get(key) or ()
            for key in ("tokens_per_second", "over_none", "over_better", "first_token_s")
        )
        found.add_row(
            name,
            str(figures["runs"]),
            _number(rate, 1, ".1f"),
            f"{_number(rate, 0, '.1f')} to {_number(rate, 2, '.1f')}",
            _number(over, 1, ".2f"),
            _number(better, 1, ".2f"),
            _number(first, 1, ".2f"),
            f"{figures['accepted_length']:.2f}" if "accepted_length" in figures else "",
            f"{figures['same_output']} of {figures['compared']}" if "compared" in figures else "",
        )
    return found


def _number(values: Sequence[float], place: int, form: str) -> str:
    return format(values[place], form) if values else ""


def _times(cell: Cell, name: str, other: str | None) -> str:
    found = ratio(cell, name, other) if other in cell else None
    return f"{found[1]:.2f}" if found else ""


def _rate(cell: Cell, name: str) -> float:
    return float(cell[name]["figures"]["tokens_per_second"][1])


def _rates(cell: Cell, name: str) -> dict[str, float]:
    """Tokens per second by group, where an answer has more than one token."""
    samples = cell[name]["samples"]
    return {key: each["rate"] for key, each in samples.items() if each["rate"]}


def _output(cell: Cell, name: str, group: str) -> str:
    return str(cell[name]["samples"][group]["output"])


def _plain(name: str) -> str:
    """The same engine and weights without speculation."""
    return " ".join([*name.split()[:2], NONE])


def draw(cells: Mapping[str, Cell]) -> str:
    """An SVG of greedy decoding. Whiskers are 95% intervals."""
    shown = {
        title.replace(GREEDY, "").replace(MANY, ", 8 users"): cell
        for title, cell in cells.items()
        if title.endswith((GREEDY, MANY))
    }
    rivals = _rivals(shown.values())
    colors = (*_COLORS, *(_RIVALS_COLORS[name] for name in rivals))
    names = ("Paceline, best drafter", "Paceline, plain decoding", *(f"{n}, best" for n in rivals))
    panels = [("tokens/s by category", list(_bars(shown, rivals, colors)))]
    if "long" in shown:
        curves = list(_curves(shown["long"], rivals, colors))
        panels.append(("tokens/s by tokens of the prompt (long)", curves))
    width, height = len(panels) * (_WIDTH + _MARGIN) + _MARGIN, _HEIGHT + 2 * _MARGIN + 30
    size = f'viewBox="0 0 {width} {height}" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">']
    parts.append('<rect width="100%" height="100%" fill="#fff"/>')
    for place, (title, lines) in enumerate(panels):
        parts.append(f'<g transform="translate({_MARGIN + place * (_WIDTH + _MARGIN)} {_MARGIN})">')
        parts += [f'<text y="-18">{title}</text>', *lines, "</g>"]
    for place, (name, color) in enumerate(zip(names, colors, strict=True)):
        x, y = _MARGIN + 180 * place, height - 14
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _rivals(cells: Iterable[Cell]) -> list[str]:
    """Other engines that any of the cells has."""
    found = {name for cell in cells for name in cell}
    return [each for each in RIVALS if any(name.startswith(each) for name in found)]


def _contestants(cell: Cell, rivals: Sequence[str]) -> list[str | None]:
    """One contestant for each color."""
    drafted = best(cell, OURS, drafted=True)
    plain = " ".join([*drafted.split()[:2], NONE]) if drafted else best(cell, OURS)
    return [drafted, plain if plain in cell else None, *(best(cell, name) for name in rivals)]


def _bars(cells: Mapping[str, Cell], rivals: Sequence[str], colors: Sequence[str]) -> Iterator[str]:
    found = {
        title: [
            name and cell[name]["figures"]["tokens_per_second"]
            for name in _contestants(cell, rivals)
        ]
        for title, cell in cells.items()
    }
    top = max((rate[2] for row in found.values() for rate in row if rate), default=1.0)
    yield from _grid(top)
    for place, (title, row) in enumerate(found.items()):
        left = _WIDTH / len(found) * place + 8
        for number, (rate, color) in enumerate(zip(row, colors, strict=True)):
            if rate:
                low, middle, high = (_HEIGHT * (1 - each / top) for each in rate)
                x = left + number * (_BAR + 1)
                box = f'x="{x:.0f}" y="{middle:.1f}" width="{_BAR}" height="{_HEIGHT - middle:.1f}"'
                yield f'<rect {box} fill="{color}"/>'
                yield f'<path d="M{x + _BAR / 2:.1f} {low:.1f}V{high:.1f}" stroke="#000"/>'
        yield f'<text x="{left:.0f}" y="{_HEIGHT + 16}">{escape(title)}</text>'


def _curves(cell: Cell, rivals: Sequence[str], colors: Sequence[str]) -> Iterator[str]:
    lines = [_line(cell, name) if name else {} for name in _contestants(cell, rivals)]
    lengths = sorted({length for line in lines for length in line})
    top = max((rate for line in lines for rate in line.values()), default=1.0)
    yield from _grid(top)
    right = _WIDTH / max(1.0, log2(lengths[-1] / lengths[0])) if lengths else 0.0
    for length in lengths:
        x = right * log2(length / lengths[0])
        yield f'<text x="{x:.0f}" y="{_HEIGHT + 16}" text-anchor="middle">{length}</text>'
    for line, color in zip(lines, colors, strict=True):
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
