"""`paceline bench step`: a decoder step by rows and context, a prefill, and plain decoding.

Engines take turns context by context, in rotating order; a roofline, measured in every turn, is one
of them. Figures are quartiles over turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.bench.models import Models
from paceline.bench.record import Results, make_console
from paceline.bench.step.engines import (
    Library,
    LlamaCpp,
    PacelineEngine,
    StepEngine,
    TransformersEngine,
)
from paceline.bench.step.parts import PARTS, profile
from paceline.bench.step.roofline import PEAKS, Roofline
from paceline.cli.command import CommandError
from paceline.kernels import cpu_kernels
from paceline.kernels._compile import levels_here
from paceline.kernels._native import VARIABLE

Quartiles = dict[str, list[float]]  # by figure
Cells = dict[str, dict[str, Quartiles]]  # by context and engine


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
        name = f"OpenVINO {args.openvino_model.stem}"
        yield Library(name, "openvino", python, args.openvino_model, vocab)
    python = args.ik_llama_python or (find_spec("ik_llama_cpp") and sys.executable)
    if not (python and args.llama_model):
        print("without ik_llama.cpp: give --ik-llama-python and --llama-model", file=sys.stderr)
    else:
        for file in args.llama_model:
            yield Library(f"ik_llama.cpp {file.stem}", "ik_llama", python, file, vocab)
    if not (args.vllm_python and models.target.is_dir()):
        print("without vLLM: give --vllm-python, and a folder as --target", file=sys.stderr)
    else:
        yield Library("vllm bfloat16", "vllm", args.vllm_python, models.target, vocab)


def show(cells: Cells, rows: Sequence[int], console: Console) -> None:
    """Print a table for every context; in brackets how much slower than its roofline it is."""
    columns = [*(f"ms_{count}" for count in rows), "tokens_per_s", "prefill_s"]
    found = {key for cell in cells.values() for figures in cell.values() for key in figures}
    columns += sorted(key for key in found if key.startswith("ms_1_"))  # cold steps
    for context, cell in cells.items():
        table = Table(
            "", *columns, title=f"Steps after {context} tokens; in brackets, times the roofline"
        )
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


def _each_level(args: argparse.Namespace) -> None:
    """Run a process for each level. Raises ``CommandError`` if this processor does not have a
    level, or the process of one failed."""
    here = levels_here()
    if unknown := [each for each in args.levels if each not in here]:
        raise CommandError(f"--levels {unknown[0]}: expected some of {', '.join(here)}")
    found = Results("step", args.output, Models.of(args).target).entries if args.resume else {}
    # The parser's own, such as the command's function, is of no use to a process.
    types = (str, int, float, list, Path, type(None))
    plain = {name: value for name, value in vars(args).items() if isinstance(value, types)}
    plain["levels"] = []
    context, label = multiprocessing.get_context("spawn"), args.label or Models.of(args).target.stem
    for level in sorted(args.levels, key=here.index, reverse=True):
        own = f"{label}, {level}"
        if own in found:
            continue
        os.environ[VARIABLE] = level  # kernels are chosen once a process
        process = context.Process(target=_run_one, args=({**plain, "label": own},))
        process.start()
        process.join()
        if process.exitcode:
            raise CommandError(f"level {level} failed, see above; --resume keeps the others")


def _run_one(given: dict[str, Any]) -> None:
    run(argparse.Namespace(**given))


def _profile(args: argparse.Namespace, models: Models, console: Console) -> dict[str, Any]:
    """Print the parts of steps behind each context; returns them by context and format."""
    found: dict[str, Any] = {}
    for weights in args.weights:
        engine = PacelineEngine(models.target, weights)
        for context in args.contexts:
            parts = profile(engine, context, args.rows)
            table = Table("ms", *parts, title=f"{engine.name}, after {context} tokens")
            for name, *values in zip(PARTS, *parts.values(), strict=True):
                table.add_row(name, *(f"{value:.2f}" for value in values))
            console.print(table)
            found.setdefault(str(context), {})[engine.name] = parts
    return {"parts": list(PARTS), "medians": found}


def run(args: argparse.Namespace) -> int:
    """Measure a target in every format of `args.weights`; print and record. Raises ``ValueError``
    if no context fits the target, or there is only one turn."""
    if args.levels:
        _each_level(args)
        return 0
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
        paceline = PacelineEngine(models.target, weights, synthetic=args.synthetic, cold=args.cold)
        config = paceline.decoder.config
        engines.append(paceline)
        if level in PEAKS:
            engines.append(Roofline(config, weights, level, threads, models.target))
    longest = max(args.contexts) if args.synthetic else config.max_position - max(args.rows)
    contexts = [each for each in args.contexts if each <= longest]
    if not contexts:
        raise ValueError(f"no context of {args.contexts} fits {config.max_position} positions")
    if args.rivals:
        engines += rivals(args, models, config.vocab_size)
    cells = measure(engines, args.rows, contexts, args.repeats, console.log)
    show(cells, args.rows, console)
    results.add(label, common | {"quartiles": cells})
    console.print(f"written to {results.file}")
    return 0
