"""Runs drills, prints a table, records what came of them."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from paceline.bench import machine
from paceline.bench.drills import clients, clocks, drafters, handles, memory, processes, swap
from paceline.bench.drills.drill import FULL, SHORT, Drill, Outcome, Scale
from paceline.bench.drills.world import World

DRILLS: dict[str, Drill] = {
    drill.name: drill
    for drill in chain(
        swap.DRILLS,
        processes.DRILLS,
        drafters.DRILLS,
        memory.DRILLS,
        clocks.DRILLS,
        clients.DRILLS,
        handles.DRILLS,
    )
}


def run(args: argparse.Namespace) -> int:
    """Run the drills asked for; 0 if everything held."""
    console = Console()
    chosen = [DRILLS[name] for name in args.drill or DRILLS]
    scale = SHORT if args.short else FULL
    outcomes = uvloop.run(run_all(chosen, scale, args.models, console))
    _show(outcomes, console)
    described = machine.describe()
    output: Path = args.output or Path("bench/results") / f"drills-{described['kind']}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    results = {
        "machine": described,
        "scale": vars(scale),
        "drills": {
            name: {"seconds": round(seconds, 1), "passed": outcome.passed, **vars(outcome)}
            for name, (outcome, seconds) in outcomes.items()
        },
    }
    output.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written to {output}")
    return 0 if all(o.passed or o.skipped for o, _ in outcomes.values()) else 1


async def run_all(
    drills: list[Drill], scale: Scale, models: Path, console: Console
) -> dict[str, tuple[Outcome, float]]:
    """Outcome and seconds of each drill, by name."""
    outcomes: dict[str, tuple[Outcome, float]] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-drills-") as scratch:
        world = World(models / "target", models / "prompts", Path(scratch), scale)
        await world.prepare()
        for drill in drills:
            console.log(f"{drill.name}: {drill.what}")
            begun = time.monotonic()
            outcomes[drill.name] = await drill.run(world), time.monotonic() - begun
    return outcomes


def _show(outcomes: dict[str, tuple[Outcome, float]], console: Console) -> None:
    table = Table("drill", "must hold", "held", "figures", show_lines=True)
    for name, (outcome, seconds) in outcomes.items():
        if outcome.skipped:
            table.add_row(name, "", "skipped", outcome.skipped)
            continue
        figures: dict[str, Any] = {**outcome.figures, "seconds": round(seconds, 1)}
        table.add_row(
            name,
            "\n".join(outcome.checks),
            "\n".join("yes" if held else "NO" for held in outcome.checks.values()),
            "\n".join(f"{figure}: {value}" for figure, value in figures.items()),
        )
    console.print(table)
