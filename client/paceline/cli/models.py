"""`paceline convert` packs a model into a folder; `paceline models` manages those in the cache."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path
from shutil import rmtree

from rich.table import Table

from paceline.cli.command import CommandError, exit_with
from paceline.cli.output import WIDE, Output
from paceline.cli.progress import described, size, waiting
from paceline.formats import WEIGHTS
from paceline.harness.models import local_model


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the folder, and the format."""
    add = parser.add_argument
    add("model", type=local_model, metavar="MODEL", help="folder, GGUF file or name of a model")
    add("folder", type=Path, metavar="FOLDER", help="new folder for the packed model")
    add("--weights", choices=WEIGHTS, default="auto", help="format of the weights")
    add("--lora", type=Path, metavar="DIR", help="adapter (PEFT) to merge into the model")


def run_convert(args: argparse.Namespace) -> int:
    """Pack the model; fails with code 1 if that is not possible."""
    from paceline.convert import convert  # with torch, which --help does not need

    now = f"packing {described(args.model)}"
    reached = [""]

    def progress(count: int, total: int) -> None:
        reached[0] = f", layer {count} of {total}"

    with exit_with(1, ValueError, OSError), waiting(lambda: now + reached[0]):
        convert(args.model, args.folder, args.weights, args.lora, progress)
    print(args.folder)
    return 0


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to remove."""
    parser.add_argument(
        "--remove",
        action="append",
        default=[],
        metavar="NAME",
        help="remove the packed model of this name, which the next start makes again; repeatable",
    )


def run_models(args: argparse.Namespace) -> int:
    """List the packed models in the cache folder, or remove some."""
    from paceline.convert.store import packed_models

    entries = packed_models()
    names = [entry.folder.name for entry in entries]
    if unknown := [name for name in args.remove if name not in names]:
        raise CommandError(f"there is no packed model {unknown[0]!r}; `paceline models` lists them")
    for entry in entries:
        if entry.folder.name in args.remove:
            rmtree(entry.folder)  # services that run keep its file open
            print(f"removed {entry.folder.name}, {size(entry.size)}")
    if not args.remove:
        table = Table("name", "size", "weights", "last use", "made of", box=None)
        for entry in entries:
            used = datetime.fromtimestamp(entry.used).isoformat(" ", "minutes")
            it = entry.description
            made_of = " + ".join(filter(None, (it.source, it.lora)))
            table.add_row(entry.folder.name, size(entry.size), it.config.weights, used, made_of)
        Output(width=WIDE).print(table)
    return 0
