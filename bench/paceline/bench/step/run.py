"""`paceline bench step`: a decoder step by rows and context, a prefill, and plain decoding.

Engines take turns context by context, in rotating order. Figures are quartiles over turns.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.bench.models import Models
from paceline.bench.record import Results, make_console
from paceline.bench.step.engines import LlamaCpp, PacelineEngine, StepEngine, TransformersEngine
from paceline.kernels import cpu_kernels
from paceline.kernels.program import Kind

Quartiles = dict[str, list[float]]  # by figure
Cells = dict[str, dict[str, Quartiles]]  # by context and engine
# Parts of a step. What prepares a product belongs to the stage of the operation before it; the
# choice of tokens is argmax here; the host makes plans, arguments and tensors.
PARTS = ("linear layers", "attention", "head and choice", "norms, RoPE, gates", "host")
_ATTENTION = {Kind.ATTEND, Kind.ATTEND_CONTEXT, Kind.DELTA}
_STEPS = 40


def measure(
    engines: Sequence[StepEngine],
    rows: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    progress: Callable[[str], None],
) -> Cells:
    runs: dict[tuple[int, StepEngine], list[dict[str, float]]] = defaultdict(list)
    for turn in range(repeats):
        for context in contexts:
            for place in range(len(engines)):
                engine = engines[(place + turn) % len(engines)]
                runs[context, engine].append(engine.measure(context, rows))
                progress(f"turn {turn + 1} of {repeats}, context {context}, {engine.name}")
    cells: Cells = {str(context): {} for context in contexts}
    for (context, engine), turns in runs.items():
        cells[str(context)][engine.name] = {
            key: quantiles((run[key] for run in turns), n=4, method="inclusive") for key in turns[0]
        }
    return cells


def rivals(args: argparse.Namespace, models: Models, vocab: int) -> Iterator[StepEngine]:
    """Yield other engines that are here; prints which are not."""
    threads = torch.get_num_threads()
    if models.target.is_dir():
        yield TransformersEngine(models.target, vocab)
    program = args.llama_bench or shutil.which("llama-bench")
    if not (program and args.llama_model):
        print("without llama.cpp: give --llama-bench and --llama-model", file=sys.stderr)
    else:
        yield from (LlamaCpp(program, model, threads) for model in args.llama_model)


def show(cells: Cells, rows: Sequence[int], console: Console) -> None:
    """Print a table of medians for every context."""
    columns = [*(f"ms_{count}" for count in rows), "tokens_per_s", "prefill_s"]
    for context, cell in cells.items():
        table = Table("", *columns, title=f"Steps after {context} tokens")
        for engine, figures in cell.items():
            row = (f"{figures[key][1]:.3g}" if key in figures else "" for key in columns)
            table.add_row(engine, *row)
        console.print(table)


def profile(engine: PacelineEngine, context: int, rows: Sequence[int]) -> dict[str, list[float]]:
    """Return the medians of the parts of a step in milliseconds, in the order of `PARTS`, by
    ``ms_ROWS``. Raises ``ValueError`` if there are no compiled kernels for the model."""
    native = engine.decoder.native
    if native is None:
        raise ValueError(f"{engine.name}: a profile needs compiled kernels for the model")
    cache, program = engine.synthetic_cache(context), native.program
    medians: dict[str, list[float]] = {}
    try:
        for count in rows:
            times: list[list[float]] = []
            for _ in range(_STEPS + 1):
                native.nanoseconds = torch.zeros(len(program.operations), dtype=torch.int64)
                began = time.perf_counter()
                choice = engine.step(cache, count)
                whole = 1e3 * (time.perf_counter() - began)
                parts: dict[str, float] = defaultdict(float, {"head and choice": 1e3 * choice})
                measured = (native.nanoseconds.double() / 1e6).tolist()
                for at, (op, ms) in enumerate(zip(program.operations, measured, strict=True)):
                    parts[_part(op.kind, at >= program.selecting)] += ms
                parts["host"] = whole - sum(parts.values())
                times.append([parts[name] for name in PARTS])
            steps = torch.tensor(times[1:])
            medians[f"ms_{count}"] = steps.median(dim=0).values.tolist()
    finally:
        native.nanoseconds = None
    return medians


def _part(kind: Kind, selected: bool) -> str:
    if selected:
        return "head and choice"
    if kind == Kind.MULTIPLY:
        return "linear layers"
    return "attention" if kind in _ATTENTION else "norms, RoPE, gates"


def _profile(args: argparse.Namespace, models: Models, console: Console) -> dict[str, Any]:
    """Print the parts of steps behind each context; returns them by context and format."""
    medians: dict[str, Any] = {}
    for weights in args.weights:
        engine = PacelineEngine(models.target, weights)
        for context in args.contexts:
            parts = profile(engine, context, args.rows)
            table = Table("ms", *parts, title=f"{engine.name}, after {context} tokens")
            for name, *values in zip(PARTS, *parts.values(), strict=True):
                table.add_row(name, *(f"{value:.2f}" for value in values))
            console.print(table)
            medians.setdefault(str(context), {})[engine.name] = parts
    return {"parts": list(PARTS), "medians": medians}


def run(args: argparse.Namespace) -> int:
    """Measure a target in every format of `args.weights`; print and record. Raises ``ValueError``
    if no context fits the target, or there is only one turn."""
    if args.repeats < 2:
        raise ValueError(f"--repeats is {args.repeats}: quartiles need at least 2")
    console = make_console()
    models = Models.of(args)
    level, threads = cpu_kernels().level, torch.get_num_threads()
    results = Results("step", args.output, models.target)
    label = args.label or models.target.stem
    common = {"level": level, "threads": threads}
    if args.profile:
        results.add(f"{label}, parts", common | _profile(args, models, console))
        return 0
    engines: list[StepEngine] = []
    for weights in args.weights:
        paceline = PacelineEngine(models.target, weights, synthetic=args.synthetic)
        config = paceline.decoder.config
        engines.append(paceline)
    max_context = max(args.contexts) if args.synthetic else config.max_position - max(args.rows)
    contexts = [context for context in args.contexts if context <= max_context]
    if not contexts:
        raise ValueError(f"no context of {args.contexts} fits {config.max_position} positions")
    if args.rivals:
        engines += rivals(args, models, config.vocab_size)
    cells = measure(engines, args.rows, contexts, args.repeats, console.log)
    show(cells, args.rows, console)
    results.add(label, common | {"quartiles": cells})
    console.print(f"written to {results.file}")
    return 0
