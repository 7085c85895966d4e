"""Moves the wall clock of both services back and forth under load."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

from paceline.bench.drills.drill import Drill, Outcome
from paceline.bench.drills.world import World

_HOUR, _DAY = 3600, 86_400
_JUMPS = (_HOUR, -_HOUR, _DAY, -_DAY, 365 * _DAY, -10 * 365 * _DAY, 0)
"""Seconds by which the clock is off, one after the other."""


async def jumps(world: World) -> Outcome:
    """Leases, deadlines and back-offs must not care what the clock says."""
    if shutil.which("gcc") is None:
        return Outcome(skipped="there is no gcc to compile the clock with")
    outcome = Outcome()
    shift = world.work / "clock"
    _set(shift, 0)
    environment = {"LD_PRELOAD": str(_compile(world.work)), "PACELINE_DRILL_CLOCK": str(shift)}
    async with world.services([world.lm], environment=environment) as services:
        async with services.load() as load:
            for jump in _JUMPS:
                _set(shift, jump)
                await asyncio.sleep(0.5)
                await load.more(max(2, world.scale.generations // 3))
        load.judge(outcome)
        outcome.checks["nobody was prefilled again"] = load.fallbacks["verifier_restarted"] == 0
        await services.end(outcome)
    outcome.figures["jumps"] = len(_JUMPS)
    return outcome


def _compile(work: Path) -> Path:
    library = work / "clock_shim.so"
    source = Path(__file__).with_name("clock_shim.c")
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"],
        check=True,
        capture_output=True,
    )
    return library


def _set(file: Path, seconds: int) -> None:
    with file.open("r+b" if file.exists() else "wb") as out:
        out.write(seconds.to_bytes(8, "little", signed=True))


DRILLS = [
    Drill("clock jumps", "the wall clock of both services jumps by up to ten years", jumps),
]
