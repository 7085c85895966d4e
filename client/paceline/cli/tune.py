"""`paceline tune`: the best settings of a drafter for given prompts and this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from paceline.cli.command import CommandError, exit_with
from paceline.cli.service_process import run_async
from paceline.client import PacelineError
from paceline.harness import PROMPT_FILE, ProcessFailed, read_prompts
from paceline.harness.models import MODEL, WEIGHTS, drafter_spec, model_path
from paceline.tune import (
    METHODS,
    TuneError,
    TuningRun,
    TuningStep,
    measuring,
    to_table,
    to_toml,
    tune,
)
from paceline.v1.drafter_pb2 import LoadDrafterRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the drafter, the prompts and the output."""
    add = parser.add_argument
    add("--target", type=model_path, required=True, metavar="MODEL", help=MODEL)
    add(
        "--drafter",
        type=drafter_spec,
        required=True,
        metavar="METHOD[:DIR][,KEY=VALUE...]",
        help=f"drafter to tune, one of {', '.join(METHODS)}; its options are kept",
    )
    add("--prompts", type=Path, required=True, metavar="FILE", help=PROMPT_FILE)
    add("--count", type=int, default=8, metavar="N", help="maximum number of prompts")
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
        options = dict(spec.options)
        if spec.method == "selfspec":
            verifier["share-weights"] = True
        roots = [f"--root={root}" for root in (folder, *spec.folders)]
        load = LoadDrafterRequest(method=spec.method, folder=str(folder), options=options)
        services = measuring(
            [
                f"--{name}" if value is True else f"--{name}={value}"
                for name, value in verifier.items()
            ],
            roots,
            load,
            read_prompts(args.prompts)[: args.count],
            args.tokens,
            args.temperature,
        )

        async def search() -> tuple[list[TuningStep], float]:
            async with services as (measure, baseline):

                async def shown(options: Mapping[str, str]) -> TuningRun:
                    run = await measure(options)
                    length, speed = run.accepted_length, run.tokens_per_second
                    text = f"accepted length {length:.2f}, {speed:.1f} tokens/s"
                    print(f"{run.label}: {text}", file=sys.stderr, flush=True)
                    return run

                return await tune(spec.method, shown), baseline

        steps, baseline = run_async(search())
        options |= steps[-1].chosen.options
        if spec.method == "selfspec":
            # `serve` starts both services at once: the drafter must wait for the shared weights.
            options.setdefault("share_weights", "always")
        tail = "".join(f",{name}={value}" for name, value in options.items())
        found = f"{spec.name}={spec.method}:{folder}{tail}"
        args.output.write_text(to_toml(verifier, found, steps, baseline), encoding="utf-8")
    Console().print(*(to_table(step, baseline) for step in steps))
    print(f"written: {args.output} (paceline serve --config {args.output})")
    return 0
