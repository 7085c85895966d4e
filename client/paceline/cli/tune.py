"""`paceline tune`: a drafter's settings, found on one's own prompts and machine."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.cli.prompts import PROMPT_FILE, read_prompts
from paceline.tune.steps import DEPTHS, METHODS, NEIGHBOURS, RATIOS, TREES, Step, Trial

if TYPE_CHECKING:
    from paceline.drafter import DrafterSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `paceline tune`."""
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="HF model folder")
    parser.add_argument(
        "--drafter",
        required=True,
        metavar="METHOD[:DIR][,KEY=VALUE...]",
        help=f"what to tune, one of {', '.join(METHODS)}; the options are kept as they are",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help=PROMPT_FILE,
    )
    parser.add_argument("--count", type=int, default=8, metavar="N", help="most prompts used")
    parser.add_argument(
        "--tokens", type=int, default=128, metavar="N", help="new tokens a prompt and trial"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], help="of the target")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("paceline.toml"),
        metavar="FILE",
        help="config file for `paceline serve --config` (default: %(default)s)",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="page with plots (default: beside --output)"
    )


def run(args: argparse.Namespace) -> int:
    """Tune; 0 with a config file, 2 if it cannot be done as asked."""
    from paceline.cli.processes import ProcessFailed
    from paceline.client import PacelineError
    from paceline.drafter import DrafterSpec, LoadError
    from paceline.tune import TuneError

    try:
        spec = DrafterSpec.parse(args.drafter)
        if spec.method not in METHODS or spec.folder is None:
            raise TuneError(
                f"--drafter {args.drafter}: expected METHOD:DIR of {', '.join(METHODS)}"
            )
        verifier = _verifier(args, spec.method)
        prompts = read_prompts(args.prompts)[: args.count]
        steps, plain = asyncio.run(_measure(args, spec, verifier, prompts))
        _write(args, spec, verifier, steps, plain)
    except (TuneError, LoadError, ProcessFailed, PacelineError, OSError, ValueError) as error:
        print(f"paceline tune: {error}", file=sys.stderr)
        return 2
    return 0


def _verifier(args: argparse.Namespace, method: str) -> dict[str, str | bool]:
    """Arguments of the verifier, in trials and in the config file."""
    found: dict[str, str | bool] = {"target": str(args.target.resolve())}
    if args.dtype is not None:
        found["dtype"] = args.dtype
    if method == "selfspec":
        found["share-weights"] = True
    return found


async def _measure(
    args: argparse.Namespace,
    spec: DrafterSpec,
    verifier: Mapping[str, str | bool],
    prompts: Sequence[str | list[int]],
) -> tuple[list[Step], float]:
    """All steps, and tokens a second without a drafter."""
    from paceline.tune import tune
    from paceline.tune.services import Trials

    assert spec.folder is not None
    chain = len(RATIOS) + len(DEPTHS) + len(NEIGHBOURS)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        total = chain if spec.method == "selfspec" else len(TREES)
        task = progress.add_task("starting", total=total)

        def tried(trial: Trial) -> None:
            said = f"{trial.accepted_length:.2f} accepted, {trial.tokens_per_second:.1f} tokens/s"
            progress.update(task, advance=1, description=f"{trial.label}: {said}")

        trials = Trials(
            [
                f"--{name}" if value is True else f"--{name}={value}"
                for name, value in verifier.items()
            ],
            spec.method,
            spec.folder.resolve(),
            spec.options,
            prompts,
            tokens=args.tokens,
            temperature=args.temperature,
            roots=[folder.resolve() for folder in spec.folders],
            tried=tried,
        )
        async with trials:
            return await tune(spec.method, trials.measure), trials.plain


def _write(
    args: argparse.Namespace,
    spec: DrafterSpec,
    verifier: Mapping[str, str | bool],
    steps: Sequence[Step],
    plain: float,
) -> None:
    """Config file, page and tables."""
    from paceline.tune import to_html, to_toml

    assert spec.folder is not None
    options = {**spec.options, **steps[-1].chosen.options}
    if "share-weights" in verifier:  # what `serve` starts at once, it waits for
        options.setdefault("weights", "shared")
    tail = "".join(f",{name}={value}" for name, value in options.items())
    load = f"{spec.name}={spec.method}:{spec.folder.resolve()}{tail}"
    page: Path = args.html or args.output.with_suffix(".html")
    args.output.write_text(to_toml(verifier, load, steps, plain), encoding="utf-8")
    page.write_text(to_html(f"paceline tune {spec.method}", steps, plain), encoding="utf-8")
    _show(steps, plain)
    print(f"written: {args.output} (paceline serve --config {args.output}), {page}")


def _show(steps: Sequence[Step], plain: float) -> None:
    console = Console()
    for step in steps:
        table = Table(title=step.title)
        for heading in ("setting", "accepted length", "tokens/s", "x plain", ""):
            table.add_column(heading, justify="left" if heading == "setting" else "right")
        for trial in step.trials:
            speed = trial.tokens_per_second
            chosen = "chosen" if trial is step.chosen else ""
            length = f"{trial.accepted_length:.2f}"
            table.add_row(trial.label, length, f"{speed:.1f}", f"{speed / plain:.2f}", chosen)
        console.print(table)
