"""Drafters that send malformed trees, or are slow."""

from __future__ import annotations

from paceline.bench.drills.drill import Drill, Outcome
from paceline.bench.drills.world import World
from paceline.bench.plugins import register

_METHODS = {
    "garbage": "paceline.bench.drills.hostile:Garbage",
    "slow": "paceline.bench.drills.hostile:Slow",
}


def _drill(method: str, what: str) -> Drill:
    async def run(world: World) -> Outcome:
        outcome = Outcome()
        half = max(1, world.scale.generations // 2)
        environment = register(world.work, _METHODS)
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
