"""One run of the benchmark: measure, print, record."""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from paceline.bench import comparison, echo, machine, prompts, replay, report

PARTS = ("echo", "comparison", "replay")


def run(args: argparse.Namespace) -> int:
    """Run the parts asked for; write JSON to `args.output` and print tables."""
    console = Console()
    parts = args.part or list(PARTS)
    results: dict[str, Any] = {"machine": machine.describe(), "dtype": args.dtype}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        work = Path(scratch)
        results["echo_us"] = _spread(echo.echo_times(work))
        results["echo_between_steps_us"] = _spread(echo.echo_times(work, 200, between_steps=True))
        if "comparison" in parts:
            results["comparison"] = uvloop.run(_compare(args, console))
        if "replay" in parts:
            console.log("replay on a 0.5B shape with random weights")
            results["replay"] = uvloop.run(replay.measure(args.work or work))
    report.show(results, console)
    kind = str(results["machine"]["kind"])
    output: Path = args.output or Path("bench/results") / f"{kind}.json"
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
