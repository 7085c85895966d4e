"""`paceline bench table`: groups of prompts, one after the other."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import uvloop

from paceline.bench.models import Models
from paceline.bench.prompts import encode, long_prompts
from paceline.bench.record import Results, digest, make_console
from paceline.bench.table.measure import measure
from paceline.bench.table.rows import show
from paceline.harness import read_prompts

Group = tuple[str, int, list[list[int]]]
"""Name, longest text in tokens, prompts."""


def run(args: argparse.Namespace) -> int:
    """Measure every group; its cells are written and shown as soon as they are measured."""
    console = make_console()
    models = Models.of(args)
    folders = {"target": models.target, **models.trained}
    weights = {name: digest(folder) for name, folder in folders.items()}
    head = {"dtype": args.dtype, "tokens": args.tokens, "weights": weights}
    results = Results("table", args.output, **head)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as work:
        for name, length, prompts in groups(args, models):
            console.log(name)
            cells = uvloop.run(
                measure(
                    models.for_context(length, Path(work)),
                    prompts,
                    dtype=args.dtype,
                    tokens=args.tokens,
                    repeats=args.repeats,
                    progress=console.log,
                )
            )
            for temperature, cell in cells.items():
                results.add(f"{name}, T = {temperature:g}", cell)
                show(f"{name}, T = {temperature:g}", cell, console)
    console.print(f"written to {results.file}")
    return 0


def groups(args: argparse.Namespace, models: Models) -> Iterator[Group]:
    """The user's prompts if there are any, else long ones by context length.

    Raises:
        ValueError: A file has no prompt that fits the target's context.
    """
    for file in args.prompts:
        room = models.max_position - args.tokens
        fitting = [ids for ids in encode(read_prompts(file), models.target) if 1 < len(ids) <= room]
        if not fitting:
            raise ValueError(f"{file}: expected prompts of 2 to {room} tokens")
        step = max(1, len(fitting) // args.texts)
        yield file.stem, 0, fitting[::step][: args.texts]
    for context in () if args.prompts else args.context:
        length = context - args.tokens
        prompts = long_prompts(models.prompts, models.target, length, args.texts)
        yield f"{context} tokens", context, prompts
