"""`paceline bench drills`: run drills, record and show their outcomes."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop
from rich.table import Table

from paceline.bench.drills import faults, fleet
from paceline.bench.drills.load import Outcome
from paceline.bench.drills.world import FULL, SHORT, Drill, Scale, World
from paceline.bench.models import Models
from paceline.bench.record import Results, make_console

DRILLS: dict[str, Drill] = {drill.name: drill for drill in (*faults.DRILLS, *fleet.DRILLS)}


def run(args: argparse.Namespace) -> int:
    """Run the named drills; 0 if everything held, 1 if not, 2 for an unknown name."""
    if unknown := set(args.drill) - set(DRILLS):
        known = ", ".join(DRILLS)
        print(f"no drill {', '.join(unknown)}; expected some of: {known}", file=sys.stderr)
        return 2
    console = make_console()
    scale = SHORT if args.short else FULL
    results = Results("drills", args.output, Models.of(args).target, scale=vars(scale))
    table = Table("drill", "must hold", "held", "figures", show_lines=True)
    failed = []

    def record(name: str, outcome: Outcome, seconds: float) -> None:
        figures = {**outcome.figures, "seconds": round(seconds, 1)}
        entry = {"passed": outcome.passed, "skipped": outcome.skipped, "checks": outcome.checks}
        results.add(name, {**entry, "figures": figures})
        if not (outcome.passed or outcome.skipped):
            failed.append(name)
        table.add_row(
            name,
            "\n".join(outcome.checks),
            outcome.skipped or "\n".join("yes" if ok else "NO" for ok in outcome.checks.values()),
            "\n".join(f"{figure}: {value}" for figure, value in figures.items()),
        )

    chosen = [DRILLS[name] for name in args.drill or DRILLS]
    uvloop.run(run_all(chosen, scale, Models.of(args), record, console.log))
    console.print(table)
    console.print(f"written to {results.file}")
    return 1 if failed else 0


async def run_all(
    drills: Sequence[Drill],
    scale: Scale,
    models: Models,
    record: Callable[[str, Outcome, float], None],
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Run drills; `record` is called with name, outcome and seconds of each as it ends."""
    with tempfile.TemporaryDirectory(prefix="paceline-drills-") as scratch:
        world = World(models.target, models.prompts, Path(scratch), scale)
        await world.prepare()
        for drill in drills:
            progress(f"{drill.name}: {drill.what}")
            begun = time.monotonic()
            try:
                outcome = await drill.run(world)
            except Exception as error:  # the next drills run all the same
                outcome = Outcome({"ran to its end": False}, {"error": repr(error)[:2000]})
            record(drill.name, outcome, time.monotonic() - begun)
