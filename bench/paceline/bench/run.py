"""One run of the benchmark: measure, print, record."""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import uvloop
from rich.console import Console

from paceline.bench import comparison, draft, echo, machine, prompts, replay, report

PARTS = ("echo", "comparison", "replay", "draft")


def run(args: argparse.Namespace) -> int:
    """Run the parts asked for; write JSON to `args.output` and print tables."""
    console = Console()
    parts = args.part or list(PARTS)
    results: dict[str, Any] = {"machine": machine.describe(), "dtype": args.dtype}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        work = Path(scratch)
        if "echo" in parts or "comparison" in parts:
            results["echo_us"] = _spread(echo.echo_times(work))
            between = echo.echo_times(work, 200, between_steps=True)
            results["echo_between_steps_us"] = _spread(between)
        if "comparison" in parts:
            results["comparison"] = uvloop.run(_compare(args, console))
        if "replay" in parts:
            console.log("replay on a 0.5B shape with random weights")
            results["replay"] = uvloop.run(replay.measure(args.work or work))
        if "draft" in parts and args.models.joinpath("longspec", "config.json").exists():
            results["draft"] = _draft(args, work, console)
    report.show(results, console)
    name = "-".join([str(results["machine"]["kind"]), *(args.part or ())])
    output: Path = args.output or Path("bench/results") / f"{name}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written to {output}")
    return 0


def _spread(times: list[float]) -> dict[str, float]:
    times = sorted(times)
    return {
        "median": statistics.median(times),
        "p10": times[len(times) // 10],
        "p90": times[9 * len(times) // 10],
    }


def _draft(args: argparse.Namespace, work: Path, console: Console) -> dict[str, Any]:
    target, drafter = args.models / "target", args.models / "longspec"
    console.log("drafts of longspec by context")
    contexts = draft.by_context(target, drafter, work, args.dtype, repeats=args.repeats)
    trees = draft.by_tree(
        target,
        drafter,
        [p for p in prompts.load(args.models / "prompts", target) if p.set in draft.PROMPT_SETS],
        args.dtype,
        progress=console.log,
    )
    return {"threads": torch.get_num_threads(), "by_context": contexts, "by_tree": trees}


async def _compare(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    demo: Path = args.models
    small = demo / "lm"
    drafters = {"ngram": "ngram"}
    if small.joinpath("config.json").exists():
        drafters["lm"] = f"lm:{small}"
    return await comparison.compare(
        prompts.load(demo / "prompts", demo / "target"),
        demo / "target",
        small if "lm" in drafters else None,
        drafters,
        dtype=args.dtype,
        tokens=args.tokens,
        repeats=args.repeats,
        progress=console.log,
    )
