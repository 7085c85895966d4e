"""`paceline bench step`: a decoder step by rows and context, a prefill, and plain decoding.

Engines take turns context by context, in rotating order; a roofline, measured in every turn, is one
of them. Figures are quartiles over turns.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from math import ceil, floor, log2
from statistics import quantiles

import torch
from rich.console import Console
from rich.table import Table

from paceline.bench.models import Models
from paceline.bench.record import Results, make_console
from paceline.bench.step.engines import (
    LlamaCpp,
    OpenVino,
    PacelineEngine,
    StepEngine,
    TransformersEngine,
)
from paceline.bench.step.roofline import PEAKS, Roofline
from paceline.kernels import cpu_kernels

Quartiles = dict[str, list[float]]  # by figure
Cells = dict[str, dict[str, Quartiles]]  # by context and engine


def measure(
    engines: Sequence[StepEngine],
    rows: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    progress: Callable[[str], None],
) -> Cells:
    """Figures of every engine.

    Args:
        engines: Take turns.
        rows: Numbers of rows of a step.
        contexts: Positions before a step.
        repeats: Turns, at least 2.
        progress: Called after every measurement.
    """
    runs: dict[tuple[int, StepEngine], list[dict[str, float]]] = defaultdict(list)
    for turn in range(repeats):
        for context in contexts:
            for place in range(len(engines)):
                engine = engines[(place + turn) % len(engines)]
                runs[context, engine].append(engine.measure(context, rows))
                progress(f"turn {turn + 1} of {repeats}, context {context}, {engine.name}")
    cells: Cells = {str(context): {} for context in contexts}
    for (context, engine), found in runs.items():
        cells[str(context)][engine.name] = {
            key: quantiles((run[key] for run in found), n=4, method="inclusive") for key in found[0]
        }
    return cells


def rivals(args: argparse.Namespace, models: Models, vocab: int) -> Iterator[StepEngine]:
    """Other engines that are here; prints which are not."""
    threads = torch.get_num_threads()
    if models.target.is_dir():
        yield TransformersEngine(models.target, vocab)
    program = args.llama_bench or shutil.which("llama-bench")
    if not (program and args.llama_model):
        print("without llama.cpp: give --llama-bench and --llama-model", file=sys.stderr)
    else:
        yield from (LlamaCpp(program, model, threads) for model in args.llama_model)
    python = args.openvino_python or (find_spec("openvino_genai") and sys.executable)
    if not (python and args.openvino_model):
        print("without OpenVINO: give --openvino-python and --openvino-model", file=sys.stderr)
    else:
        yield OpenVino(python, args.openvino_model, threads, vocab)


def show(cells: Cells, rows: Sequence[int], console: Console) -> None:
    """Print a table for every context; in brackets how much slower than its roofline it is."""
    columns = [*(f"ms_{count}" for count in rows), "tokens_per_s", "prefill_s"]
    for context, cell in cells.items():
        table = Table("", *columns, title=f"after {context} tokens (times the roofline)")
        for engine, figures in cell.items():
            limit = cell.get(f"roofline {engine.removeprefix('paceline ')}", {})
            table.add_row(engine, *(_text(key, figures, limit) for key in columns))
        console.print(table)


def _text(key: str, figures: Quartiles, limit: Quartiles) -> str:
    if key not in figures:
        return ""
    _, value, _ = figures[key]
    if key not in limit:
        return f"{value:.3g}"
    slower = value / limit[key][1]
    return f"{value:.3g} ({1 / slower if key == 'tokens_per_s' else slower:.2f})"


def _times(cell: dict[str, Quartiles]) -> dict[str, dict[int, float]]:
    """Median milliseconds by engine and rows."""
    return {
        engine: {int(key[3:]): ms for key, (_, ms, _) in figures.items() if key[:3] == "ms_"}
        for engine, figures in cell.items()
        if any(key[:3] == "ms_" for key in figures)
    }


def run(args: argparse.Namespace) -> int:
    """Measure a target in every format of `args.weights`; print, draw and record.

    Raises:
        ValueError: No context fits the target, or there is only one turn.
    """
    console = make_console()
    models = Models.of(args)
    level, threads = cpu_kernels().level, torch.get_num_threads()
    engines: list[StepEngine] = []
    for weights in args.weights:
        paceline = PacelineEngine(models.target, weights)
        config = paceline.decoder.config
        engines.append(paceline)
        engines += [Roofline(config, weights, level, threads)] if level in PEAKS else []
    contexts = [each for each in args.contexts if each + max(args.rows) <= config.max_position]
    if args.repeats < 2:
        raise ValueError(f"--repeats is {args.repeats}: quartiles need at least 2")
    if not contexts:
        raise ValueError(f"no context of {args.contexts} fits {config.max_position} positions")
    if args.rivals:
        engines += rivals(args, models, config.vocab_size)
    cells = measure(engines, args.rows, contexts, args.repeats, console.log)
    show(cells, args.rows, console)
    results = Results("step", args.output)
    entry = {"level": level, "threads": threads, "quartiles": cells}
    results.add(args.label or models.target.stem, entry)
    picture = results.file.with_suffix(".svg")
    picture.write_text(draw({context: _times(cell) for context, cell in cells.items()}))
    console.print(f"written to {results.file} and {picture}")
    return 0


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
