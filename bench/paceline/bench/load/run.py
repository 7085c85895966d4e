"""`paceline bench load`: no drafter, fixed trees and the verifier's scheduler under load."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from paceline.bench.load.requests import Load, Window
from paceline.bench.models import Models
from paceline.bench.prompts import Prompt, demo_prompts
from paceline.bench.record import Results, make_console
from paceline.bench.services import ALWAYS, services

MODES = ("none", "fixed", "scheduled")
"""No drafter; a tree of `FIXED_NODES` in every round; adaptive drafting with the scheduler."""

FIXED_NODES = 8

Point = tuple[str, float]
"""What is held fixed, "concurrency" or "request rate" (per second), and its value."""

_PROMPTS_PER_TURN = 37  # each turn begins with another prompt, the same one in all modes


async def measure(
    models: Models,
    drafter: str,
    prompts: Sequence[Prompt],
    points: Sequence[Point],
    *,
    weights: str,
    requests: int,
    seconds: float,
    repeats: int,
    progress: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Figures by point and mode.

    Modes run one after the other, in random order in every turn. Without a drafter and with fixed
    trees the verifier has no scheduler, so each turn has two pairs of services, one of which is
    idle. Processes are started anew in every turn.

    Args:
        models: The target and its drafters.
        drafter: Name of the drafter.
        prompts: Requested in turn.
        points: Loads.
        weights: Format of the target's weights.
        requests: Requests of a window at a concurrency, at least.
        seconds: Length of a window at a request rate.
        repeats: Turns.
        progress: Called after every point.
    """
    runs: dict[Point, dict[str, list[dict[str, Any]]]] = {
        point: {mode: [] for mode in MODES} for point in points
    }
    spec = {drafter: models.drafters[drafter]}
    order = random.Random(1)
    for turn in range(repeats):
        # The first verifier measures its costs anew; later ones read them.
        schedule = "auto" if turn else "profile"
        with (
            services(
                models.target, spec, weights, verifier=[f"--schedule={schedule}"]
            ) as scheduled,
            services(models.target, spec, weights, verifier=["--schedule=off"]) as other,
        ):
            async with scheduled.client() as adaptive, other.client(ALWAYS) as always:
                loads = {
                    "none": Load(always, prompts, "none"),
                    "fixed": Load(always, prompts, drafter, max_nodes=FIXED_NODES),
                    "scheduled": Load(adaptive, prompts, drafter),
                }
                for load in loads.values():
                    await load.concurrent(2, 6)
                for point in points:
                    for mode in order.sample(MODES, len(MODES)):
                        first = turn * _PROMPTS_PER_TURN
                        window = await _window(loads[mode], point, requests, seconds, first)
                        runs[point][mode].append(window.summary())
                    progress(f"turn {turn + 1} of {repeats}, {point[0]} {point[1]:g}")
    return {f"{name} {value:g}": summary(found) for (name, value), found in runs.items()}


async def _window(load: Load, point: Point, requests: int, seconds: float, first: int) -> Window:
    name, value = point
    if name == "concurrency":
        return await load.concurrent(int(value), max(requests, int(value)), first)
    return await load.arriving(value, seconds, first)


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """By mode, the run with the median throughput, and ratios of throughput within a turn."""
    rates = {mode: [run["tokens_per_second"] for run in found] for mode, found in runs.items()}
    return {
        mode: {
            **sorted(found, key=lambda run: float(run["tokens_per_second"]))[len(found) // 2],
            "all_tokens_per_second": rates[mode],
            "against_none": median(
                rate / none for rate, none in zip(rates[mode], rates["none"], strict=True)
            ),
        }
        for mode, found in runs.items()
    }


def _points(args: argparse.Namespace) -> Iterator[Point]:
    yield from (("concurrency", float(users)) for users in args.concurrency)
    yield from (("request rate", rate) for rate in args.request_rate)


def run(args: argparse.Namespace) -> int:
    """Measure every point, show and record it."""
    console = make_console()
    models = Models.of(args)
    prompts = demo_prompts(models.prompts, models.target)
    results = Results("load", args.output, weights=args.weights)
    found = uvloop.run(
        measure(
            models,
            args.drafter,
            [prompt for prompt in prompts if prompt.set in args.set],
            list(_points(args)),
            weights=args.weights,
            requests=args.requests,
            seconds=args.seconds,
            repeats=args.repeats,
            progress=console.log,
        )
    )
    kind = f"{args.drafter}, {', '.join(args.set)}"
    for point, modes in found.items():
        results.add(f"{kind}, {point}", modes)
    show(kind, found, console)
    console.print(f"written to {results.file}")
    return 0


def show(title: str, points: dict[str, dict[str, Any]], console: Console) -> None:
    """Print all points."""
    table = Table(title=title, caption="times are medians, 99th percentiles in brackets")
    for heading in (
        *("load", "mode", "tokens/s", "x none", "TTFT ms", "TPOT ms", "ITL ms"),
        *("drafted share", "accepted length", "drafted", "checked"),
    ):
        table.add_column(heading, justify="left" if heading in ("load", "mode") else "right")
    for point, modes in points.items():
        for mode, row in modes.items():
            times = (row["ttft_ms"], row["tpot_ms"], row["itl_ms"])
            nodes = (row["accepted_length"], row["drafted_nodes"], row["checked_nodes"])
            table.add_row(
                point,
                mode,
                f"{row['tokens_per_second']:.0f}",
                f"{row['against_none']:.2f}",
                *(
                    "" if each is None else f"{each['p50']:.0f} ({each['p99']:.0f})"
                    for each in times
                ),
                f"{row['drafted_share']:.0%}",
                *("" if each is None else f"{each:.1f}" for each in nodes),
            )
    console.print(table)
