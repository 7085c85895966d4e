"""`paceline tune`: the best settings of a drafter for given prompts and this machine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.cli.errors import CommandError, exit_with
from paceline.cli.service_process import run_async
from paceline.cli.tables import write_html
from paceline.cli.verifier import WEIGHTS
from paceline.client import PacelineError
from paceline.harness import PROMPT_FILE, ProcessFailed, read_prompts
from paceline.tune import (
    METHODS,
    Step,
    TuneError,
    TuningRun,
    TuningServices,
    run_count,
    to_table,
    to_toml,
    tune,
)

if TYPE_CHECKING:
    from paceline.drafter import DrafterSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the drafter, the prompts and the output."""
    add = parser.add_argument
    add("--target", type=Path, required=True, metavar="PATH", help="HF folder or GGUF file")
    add(
        "--drafter",
        required=True,
        metavar="METHOD[:DIR][,KEY=VALUE...]",
        help=f"drafter to tune, one of {', '.join(METHODS)}; its options are kept",
    )
    add("--prompts", type=Path, required=True, metavar="FILE", help=PROMPT_FILE)
    add("--count", type=int, default=8, metavar="N", help="most prompts used")
    add("--tokens", type=int, default=128, metavar="N", help="new tokens per prompt and run")
    add("--temperature", type=float, default=0.0, help="default: %(default)s")
    add("--weights", choices=WEIGHTS, help="format of the target's weights (default: auto)")
    add(
        "--output",
        type=Path,
        default=Path("paceline.toml"),
        metavar="FILE",
        help="config file for `paceline serve --config` (default: %(default)s)",
    )
    add("--html", type=Path, metavar="FILE", help="page with all runs (default: next to --output)")


def run(args: argparse.Namespace) -> int:
    """Tune and write a config file; fails with code 2."""
    from paceline.drafter import DrafterSpec, LoadError

    with exit_with(2, TuneError, LoadError, ProcessFailed, PacelineError, OSError, ValueError):
        spec = DrafterSpec.parse(args.drafter)
        if spec.method not in METHODS or spec.folder is None:
            raise CommandError(
                f"--drafter {args.drafter}: expected METHOD:DIR of {', '.join(METHODS)}"
            )
        folder = spec.folder.resolve()
        verifier: dict[str, str | bool] = {"target": str(args.target.resolve())}
        if args.weights is not None:
            verifier["weights"] = args.weights
        if spec.method == "selfspec":
            verifier["share-weights"] = True
        prompts = read_prompts(args.prompts)[: args.count]
        steps, baseline = run_async(_measure(args, spec, folder, verifier, prompts))
        _write(args, spec, folder, verifier, steps, baseline)
    return 0


async def _measure(
    args: argparse.Namespace,
    spec: DrafterSpec,
    folder: Path,
    verifier: Mapping[str, str | bool],
    prompts: Sequence[str | list[int]],
) -> tuple[list[Step], float]:
    """All steps, and the speed without a drafter in tokens/s."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=run_count(spec.method))

        def show(run: TuningRun) -> None:
            speed = f"{run.accepted_length:.2f} accepted, {run.tokens_per_second:.1f} tokens/s"
            progress.update(task, advance=1, description=f"{run.label}: {speed}")

        services = TuningServices(
            [
                f"--{name}" if value is True else f"--{name}={value}"
                for name, value in verifier.items()
            ],
            spec.method,
            folder,
            spec.options,
            prompts,
            tokens=args.tokens,
            temperature=args.temperature,
            roots=spec.folders,
            on_run=show,
        )
        async with services:
            return await tune(spec.method, services.measure), services.baseline


def _write(
    args: argparse.Namespace,
    spec: DrafterSpec,
    folder: Path,
    verifier: Mapping[str, str | bool],
    steps: Sequence[Step],
    baseline: float,
) -> None:
    """Writes the config file, the page and the terminal's tables."""
    options = {**spec.options, **steps[-1].chosen.options}
    if "share-weights" in verifier:
        # `serve` starts both services at once: the drafter must wait for the shared weights.
        options.setdefault("weights", "shared")
    tail = "".join(f",{name}={value}" for name, value in options.items())
    load = f"{spec.name}={spec.method}:{folder}{tail}"
    page: Path = args.html or args.output.with_suffix(".html")
    args.output.write_text(to_toml(verifier, load, steps, baseline), encoding="utf-8")
    tables = [to_table(step, baseline) for step in steps]
    title = f"paceline tune {spec.method}: {baseline:.1f} tokens/s without a drafter"
    write_html(page, title, *tables)
    Console().print(*tables)
    print(f"written: {args.output} (paceline serve --config {args.output}), {page}")
