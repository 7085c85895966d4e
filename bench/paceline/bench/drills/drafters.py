"""Drafters that send malformed trees, or are slow."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.bench.drills.drill import Drill, Outcome
from paceline.bench.drills.world import World

_ENTRY_POINTS = """[paceline.methods]
garbage = paceline.bench.drills.hostile:Garbage
slow = paceline.bench.drills.hostile:Slow
"""


def _registered(folder: Path) -> dict[str, str]:
    """Registers the methods of the drills; returns the environment in which they are found."""
    info = folder / "drill_methods-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: drill-methods\nVersion: 1\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    paths = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _drill(method: str, what: str) -> Drill:
    async def run(world: World) -> Outcome:
        outcome = Outcome()
        half = max(1, world.scale.generations // 2)
        environment = _registered(world.work)
        async with world.services([method, "ngram"], environment=environment) as services:
            # Two loads: generations with one drafter must not be affected by the other drafter.
            async with services.load("ngram", half) as others, services.load(method, half) as load:
                await load.more(2 * world.scale.generations)
            others.report(outcome)
            unaffected = all(outcome.checks.values()) and others.drafted_rounds > 0
            load.report(outcome)
            outcome.checks["others unaffected"] = unaffected
            await services.end(outcome)
        return outcome

    return Drill(f"drafter {method}", what, run)


DRILLS = [
    _drill("garbage", "every tree is malformed; half of the generations use a good drafter"),
    _drill("slow", "a draft takes 0.3 s; half of the generations use a good drafter"),
]
