"""Runs drills, prints a table, records what came of them."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
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
    described = machine.describe()
    output: Path = args.output or Path("bench/results") / f"drills-{described['kind']}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": described, "scale": vars(scale), "drills": {}}
    new: dict[str, Any] = {}

    def record(name: str, outcome: Outcome, seconds: float) -> None:
        new[name] = {"passed": outcome.passed, **vars(outcome), "seconds": round(seconds, 1)}
        merged = {**(_recorded(output, results) if args.drill else {}), **new}
        results["drills"] = {name: merged[name] for name in DRILLS if name in merged}
        output.write_text(json.dumps(results, indent=1) + "\n")

    uvloop.run(run_all(chosen, scale, args.models, record, console.log))
    _show(new, console)
    console.print(f"written to {output}")
    return 0 if all(o["passed"] or o["skipped"] for o in new.values()) else 1


def _recorded(output: Path, like: dict[str, Any]) -> dict[str, Any]:
    """Drills that a file holds of another run on the same kind of machine, at the same scale."""
    try:
        before = json.loads(output.read_text())
        same = (before["machine"]["kind"], before["scale"]) == (
            like["machine"]["kind"],
            like["scale"],
        )
        return dict(before["drills"]) if same else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


async def run_all(
    drills: list[Drill],
    scale: Scale,
    models: Path,
    record: Callable[[str, Outcome, float], None],
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Run drills; ``record`` is told name, outcome and seconds of each as it ends."""
    with tempfile.TemporaryDirectory(prefix="paceline-drills-") as scratch:
        world = World(models / "target", models / "prompts", Path(scratch), scale)
        await world.prepare()
        for drill in drills:
            progress(f"{drill.name}: {drill.what}")
            begun = time.monotonic()
            try:
                outcome = await drill.run(world)
            except Exception as error:  # the others are to be run all the same
                outcome = Outcome({"ran to its end": False}, {"error": repr(error)[:2000]})
            record(drill.name, outcome, time.monotonic() - begun)


def _show(outcomes: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table("drill", "must hold", "held", "figures", show_lines=True)
    for name, outcome in outcomes.items():
        if outcome["skipped"]:
            table.add_row(name, "", "skipped", outcome["skipped"])
            continue
        checks: dict[str, bool] = outcome["checks"]
        figures = {**outcome["figures"], "seconds": outcome["seconds"]}
        table.add_row(
            name,
            "\n".join(checks),
            "\n".join("yes" if held else "NO" for held in checks.values()),
            "\n".join(f"{figure}: {value}" for figure, value in figures.items()),
        )
    console.print(table)
