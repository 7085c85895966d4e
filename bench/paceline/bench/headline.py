"""What a user can quote: five lines of a table's results, and a bar chart of README.

The chart is made again by ``paceline bench headline --chart docs/images/speed.svg``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from paceline.bench.record import Results

FREE = ("chat", "code", "mathematics", "edit", "long")
"""Categories of prompts whose answers are free."""

_FORMATS = {"int4": "4 bits", "int8": "8 bits", "bfloat16": "bfloat16", "float32": "float32"}
_PLAIN = "none"
_CELL = "{}, T = 0, 1 user"
_WIDTH, _LABEL, _BAR, _GAP = 760, 240, 18, 8  # of the picture, of labels, heights in pixels
_STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600 }
.card { fill: #ffffff } .plain { fill: #3b82c4 } .drafted { fill: #d9652b } .other { fill: #8b949e }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .card { fill: #0d1117 } }
</style>"""

Bar = tuple[str, Sequence[tuple[str, float]], str]
"""Its name, its ends as class and value, the smallest first, and what stands behind it."""


def headline(machine: str, cells: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Five lines: machine, format, plain beside other engines, drafting by prompts, identity.

    Args:
        machine: Name of the kind of machine.
        cells: Contestants by name in each cell of a table, with their figures.

    Returns:
        Lines of the fastest format of Paceline in chats of one user at T = 0; fewer where the
        table lacks what a line needs.
    """
    chat = cells.get(_CELL.format("chat"), {})
    ours = {name: _rate(each) for name, each in chat.items() if _is_plain(name)}
    if not ours:
        return [f"Machine: {machine}"]
    best = max(ours, key=lambda name: ours[name])
    form = best.split()[1]
    lines = [f"Machine: {machine}", f"Format: {_FORMATS.get(form, form)}"]
    others = {name: _rate(each) for name, each in chat.items() if not name.startswith("paceline ")}
    plain = f"Plain decoding: {ours[best]:.0f} tokens/s in chats of one user"
    if others:
        rival = max(others, key=lambda name: others[name])
        ratio = ours[best] / others[rival]
        plain += (
            f", {ratio:.1f} times the fastest other engine here ({rival.removesuffix(' none')})"
        )
    lines.append(plain)
    gains = []
    for kind in FREE:
        cell = cells.get(_CELL.format(kind), {})
        over = {
            name.split()[2]: each["figures"]["over_none"][1]
            for name, each in cell.items()
            if name.startswith(f"paceline {form} ") and "over_none" in each["figures"]
        }
        if over:
            fastest = max(over, key=lambda name: over[name])
            gains.append(f"{kind} {over[fastest]:.2f} ({fastest})")
    if gains:
        lines.append(f"With drafts, times as fast as plain decoding: {', '.join(gains)}")
    compared, same = 0, 0
    for cell in cells.values():
        for name, each in cell.items():
            if name.startswith("paceline ") and "compared" in each.get("figures", {}):
                compared += each["figures"]["compared"]
                same += each["figures"]["same_output"]
    if compared:
        answer = "yes" if same == compared else "NO"
        lines.append(f"Identical to plain decoding: {answer} ({same} of {compared} texts)")
    return lines


def chart(step: Mapping[str, Any], table: Mapping[str, Any], entry: str, form: str) -> str:
    """The bars of README: engines without drafts, and drafting on top by kind of prompt.

    An engine that ``step`` lacks and ``table`` has is drawn with its plain speed in chats.

    Args:
        step: A result file of ``paceline bench step --rivals``.
        table: One of ``paceline bench table`` on the same kind of machine.
        entry: Name of the entry of ``step``.
        form: Format of Paceline's weights in the second part.

    Raises:
        ValueError: The files are of different machines.
    """
    machine = step["machine"]["kind"]
    if machine != table["machine"]["kind"]:
        raise ValueError(f"{machine} and {table['machine']['kind']}: expected one machine")
    context, engines = next(iter(step["results"][entry]["quartiles"].items()))
    first: list[Bar] = []
    for name, figures in engines.items():
        if not name.startswith("roofline") and "tokens_per_s" in figures:
            value = figures["tokens_per_s"][1]
            kind = "plain" if name.startswith("paceline ") else "other"
            first.append((_shown(name), [(kind, value)], f"{value:.0f}"))
    chat = table["results"].get(_CELL.format("chat"), {"contestants": {}})["contestants"]
    measured = {_engine(name) for name in engines}
    for name, each in chat.items():
        if name.endswith(f" {_PLAIN}") and _engine(name) not in measured:
            label = f"{_shown(name.removesuffix(f' {_PLAIN}'))}, chats"
            first.append((label, [("other", _rate(each))], f"{_rate(each):.0f}"))
    first.sort(key=lambda bar: -bar[1][0][1])
    second: list[Bar] = []
    for kind in FREE:
        cell = table["results"][_CELL.format(kind)]["contestants"]
        plain = _rate(cell[f"paceline {form} {_PLAIN}"])
        over = {
            name.split()[2]: each["figures"]["over_none"][1]
            for name, each in cell.items()
            if name.startswith(f"paceline {form} ")
            and "over_none" in each["figures"]
            and not name.endswith(("-alone", "-always"))
        }
        best = max(over, key=lambda name: over[name])
        ends = [("plain", plain), ("drafted", plain * over[best])]
        second.append((kind, ends, f"{plain:.0f}, with {best} {over[best]:.2f} times as fast"))
    parts = {
        f"Without drafts behind {context} tokens, tokens/s": first,
        f"Drafting on top, {_FORMATS.get(form, form)}, one user, T = 0": second,
    }
    return _draw(parts)


def _draw(parts: Mapping[str, Sequence[Bar]]) -> str:
    most = max(ends[-1][1] for bars in parts.values() for _, ends, _ in bars)
    scale = (_WIDTH - _LABEL - 260) / most
    lines, y = [_STYLE, '<rect class="card" width="100%" height="100%"/>'], 26
    for title, bars in parts.items():
        lines.append(f'<text class="title" x="12" y="{y}">{title}</text>')
        y += 12
        for name, ends, text in bars:
            lines.append(
                f'<text x="{_LABEL - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>'
            )
            low = 0.0
            for kind, value in ends:
                x, width = _LABEL + low * scale, max(0.0, value - low) * scale
                lines.append(
                    f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" '
                    f'height="{_BAR}"/>'
                )
                low = max(low, value)
            lines.append(
                f'<text x="{_LABEL + low * scale + 8:.1f}" y="{y + 14}">{escape(text)}</text>'
            )
            y += _BAR + _GAP
        y += 26
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y - 20}">'
    return "\n".join([head, *lines, "</svg>\n"])


def _rate(contestant: Mapping[str, Any]) -> float:
    return float(contestant["figures"]["tokens_per_second"][1])


def _shown(name: str) -> str:
    """How a picture names an engine."""
    name = name.replace("SmolLM2-", "")
    names = {"paceline": "Paceline", "vllm": "vLLM", "openvino": "OpenVINO"}
    engine = _engine(name)
    if engine not in names:
        return name
    version = name.split()[0][len(engine) :].replace("-", " ")
    return f"{names[engine]}{version} {name.partition(' ')[2]}"


def _engine(name: str) -> str:
    """The engine of a contestant such as "vllm-0.32.0 bfloat16 none", without its version."""
    return name.split()[0].partition("-")[0].lower()


def _is_plain(name: str) -> bool:
    return name.startswith("paceline ") and name.split()[-1] == _PLAIN


def run(args: argparse.Namespace) -> int:
    """Print the lines of a result file; with ``--chart``, draw the bars of README."""
    table = json.loads(Results("table", args.output).file.read_text())
    if args.chart is not None:
        step = json.loads(args.step.read_text())
        args.chart.write_text(chart(step, table, args.entry, args.weights))
    cells = {name: entry["contestants"] for name, entry in table["results"].items()}
    print("\n".join(headline(table["machine"]["kind"], cells)))
    return 0
