"""One run of the benchmark: measure part by part, record, print."""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.bench import echo, machine, report
from paceline.bench.load import report as load_report
from paceline.bench.load.workload import WORKLOADS
from paceline.bench.parts import PARTS
from paceline.bench.record import Book, digest
from paceline.bench.setting import Bench

RESULTS = Path("bench/results")

_WIDTH = 170  # columns where there is no terminal to ask: the widest table is shown whole


def run(args: argparse.Namespace) -> int:
    """Run the parts asked for; each is written to its result file as soon as it is done."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    described = machine.describe()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        work: Path = args.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(args, work, console, Book(RESULTS, {}))
        results: dict[str, Any] = {
            "machine": described,
            "dtype": args.dtype,
            "longspec": digest(bench.longspec),
            "dspark": digest(bench.dspark),
            "echo_us": _spread(echo.echo_times(Path(scratch))),
            "echo_between_steps_us": _spread(
                echo.echo_times(Path(scratch), 200, between_steps=True)
            ),
        }
        head = dict(results)
        for name in args.part or (["server"] if args.server else PARTS):
            part = PARTS[name]
            console.log(f"part {name}")
            topic = f"-{part.topic}" if part.topic else ""
            bench.book = Book(args.output or RESULTS / f"{described['kind']}{topic}.json", head)
            found = part.measure(bench)
            if found is not None:
                results[name] = found
                bench.book.add(name, found)
                console.log(
                    f"written to {bench.book.file}, {time.monotonic() - began:.0f} s so far"
                )
    report.show(results, console)
    for name in WORKLOADS:
        if name in results:
            load_report.show(results[name], console)
    return 0


def _spread(times: list[float]) -> dict[str, float]:
    times = sorted(times)
    return {
        "median": statistics.median(times),
        "p10": times[len(times) // 10],
        "p90": times[9 * len(times) // 10],
    }
