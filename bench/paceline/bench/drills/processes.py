"""Kills, stops and restarts either process at random moments, and shifts the clock of both."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from paceline.bench.drills.drill import Drill, Outcome
from paceline.bench.drills.world import World
from paceline.harness import ServiceProcess

RECOVERY_SECONDS = 30.0
"""A generation begun after a process is back must have ended within."""

_STOPPED_SECONDS = 2.0
_HOUR, _DAY = 3600, 86_400
_JUMPS = (_HOUR, -_HOUR, _DAY, -_DAY, 365 * _DAY, -10 * 365 * _DAY, 0)
"""Offsets of the wall clock, one after the other. Unit: seconds."""


def _kill(process: ServiceProcess) -> None:
    process.kill()
    process.start()


def _stop(process: ServiceProcess) -> None:
    process.send_signal(signal.SIGSTOP)
    time.sleep(_STOPPED_SECONDS)
    process.send_signal(signal.SIGCONT)


def _restart(process: ServiceProcess) -> None:
    process.terminate()
    process.start()


_HITS = {
    "killed": ("SIGKILL, and start again,", _kill),
    "stopped": ("SIGSTOP for two seconds", _stop),
    "restarted": ("drain and start again", _restart),
}


def _drill(
    kind: Literal["verifier", "drafter"],
    name: str,
    what: str,
    hit: Callable[[ServiceProcess], None],
) -> Drill:
    async def run(world: World) -> Outcome:
        outcome = Outcome()
        recoveries: list[float] = []
        async with world.services([world.lm]) as services:
            process = services.verifier if kind == "verifier" else services.drafter
            async with services.load() as load:
                for _ in range(world.scale.hits):
                    await asyncio.sleep(world.chance.uniform(0.0, 1.5))
                    await asyncio.to_thread(hit, process)
                    drafted = kind == "drafter"
                    recoveries.append(await load.recovered(RECOVERY_SECONDS, drafted=drafted))
            load.report(outcome)
            await services.end(outcome)
        slowest = max(recoveries)
        outcome.checks[f"recovered within {RECOVERY_SECONDS:g} s"] = slowest < RECOVERY_SECONDS
        outcome.figures |= {"hits": len(recoveries), "slowest recovery s": round(slowest, 2)}
        return outcome

    return Drill(f"{kind} {name}", f"{what} the {kind}", run)


async def clock_jumps(world: World) -> Outcome:
    """Leases, deadlines and back-offs must not depend on the wall clock."""
    if shutil.which("gcc") is None:
        return Outcome(skipped="there is no gcc to compile the clock with")
    outcome = Outcome()
    shift = world.work / "clock"
    _write(shift, 0)
    environment = {"LD_PRELOAD": str(_compile(world.work)), "PACELINE_DRILL_CLOCK": str(shift)}
    async with world.services([world.lm], environment=environment) as services:
        async with services.load() as load:
            for jump in _JUMPS:
                _write(shift, jump)
                await asyncio.sleep(0.5)
                await load.more(max(2, world.scale.generations // 3))
        load.report(outcome)
        outcome.checks["no text was prefilled again"] = load.fallbacks["verifier_restarted"] == 0
        await services.end(outcome)
    outcome.figures["jumps"] = len(_JUMPS)
    return outcome


def _compile(work: Path) -> Path:
    library = work / "clock_shim.so"
    source = Path(__file__).with_name("clock_shim.c")
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


def _write(file: Path, seconds: int) -> None:
    with file.open("r+b" if file.exists() else "wb") as out:  # in place: services map the file
        out.write(seconds.to_bytes(8, "little", signed=True))


DRILLS = [
    *(_drill("verifier", name, *hit) for name, hit in _HITS.items()),
    *(_drill("drafter", name, *hit) for name, hit in _HITS.items()),
    Drill("clock jumps", "the wall clock of both services jumps by up to ten years", clock_jumps),
]
