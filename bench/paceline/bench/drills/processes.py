"""Kills, stops and restarts either process at random moments."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Literal

from paceline.bench.drills.drill import Drill, Outcome
from paceline.bench.drills.world import World
from paceline.harness import ServiceProcess

RECOVERY_SECONDS = 30.0
"""A generation begun after a process is back must have ended within."""

_STOPPED_SECONDS = 2.0


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
                    recoveries.append(
                        await load.recovered(RECOVERY_SECONDS, drafted=kind == "drafter")
                    )
            load.judge(outcome)
            outcome.checks[f"recovered within {RECOVERY_SECONDS:g} s"] = (
                max(recoveries) < RECOVERY_SECONDS
            )
            await services.end(outcome)
        outcome.figures |= {
            "hits": len(recoveries),
            "slowest recovery s": round(max(recoveries), 2),
        }
        return outcome

    return Drill(f"{kind} {name}", f"{what} the {kind}", run)


DRILLS = [
    _drill("verifier", "killed", "SIGKILL, and start again,", _kill),
    _drill("verifier", "stopped", "SIGSTOP for two seconds", _stop),
    _drill("verifier", "restarted", "drain and start again", _restart),
    _drill("drafter", "killed", "SIGKILL, and start again,", _kill),
    _drill("drafter", "stopped", "SIGSTOP for two seconds", _stop),
    _drill("drafter", "restarted", "drain and start again", _restart),
]
