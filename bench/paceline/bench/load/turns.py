"""Scheduled decoding beside plain decoding and beside fixed trees, turn by turn."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from paceline.bench.lanes import Lane, Worker, shares
from paceline.bench.load.users import Load
from paceline.bench.load.workload import LENGTHS, TOKENS, Spell, Workload
from paceline.bench.prompts import Prompt
from paceline.bench.served import Services
from paceline.client import DraftOptions

MODES = ("plain", "fixed", "scheduled")
"""No speculation; a tree of `FIXED_NODES`, checked whole, in every round; the scheduler."""

FIXED_NODES = 8

_RIVALS = MODES[:2]
# What windows of scheduled decoding and of another mode came to, at the same time.
_Pair = tuple[dict[str, Any], dict[str, Any]]
_PROMPTS_A_TURN = 37  # each turn begins with other prompts, the same in all modes
# Generations that are watched, at least, and that the scheduler has first to find out what pays
# under a load, at least: its like run for days.
_LEAST_GENERATIONS, _FINDING_OUT = 12, 6


async def measure(
    workload: Workload,
    prompts: Sequence[Prompt],
    target: Path,
    drafter: str,
    *,
    dtype: str,
    loops: Sequence[str],
    seconds: float,
    repeats: int,
    progress: Callable[[str], object],
) -> dict[str, Any]:
    """Closed and open loops of all modes, `repeats` turns of them.

    Scheduled decoding runs beside each of the others at the same time, every one on cores of its
    own with a verifier, a drafter and a client of its own, and then again with the cores swapped.
    The others' verifier has no scheduler. Each turn has processes of its own: of two that are alike
    one may be a few percent faster as long as it lives.

    Args:
        workload: How much at a time.
        prompts: What to ask for, in turn.
        target: Model folder.
        drafter: Specification, METHOD[:DIR][,key=value...], under the name "load".
        dtype: Of the target.
        loops: Which of `LOOPS`.
        seconds: How long each open loop is watched.
        repeats: Turns.
        progress: Told what is under way.
    """
    points = [("closed", float(users)) for users in workload.users if "closed" in loops]
    points += [("open", rate) for rate in workload.arrivals if "open" in loops]
    pairs: dict[tuple[str, float], dict[str, list[_Pair]]] = {
        point: {rival: [] for rival in _RIVALS} for point in points
    }
    order = random.Random(1)
    start = partial(_services, list(prompts), target, drafter, dtype)
    for turn in range(repeats):
        async with AsyncExitStack() as running:
            schedules = ("auto" if turn else "profile", "off")
            lanes = [
                await running.enter_async_context(Lane(cores, partial(start, schedule)))
                for cores, schedule in zip(shares(), schedules, strict=True)
            ]
            for loop, size in points:
                spell = Spell(loop, size, seconds, turn * _PROMPTS_A_TURN)
                if loop == "closed":
                    await _both(lanes, "plain", replace(spell, much=max(_FINDING_OUT, size)))
                    spell = replace(spell, much=max(_LEAST_GENERATIONS, size))
                rivals = order.sample(_RIVALS, len(_RIVALS))
                for rival, found in (await _swapped(lanes, rivals, spell)).items():
                    pairs[loop, size][rival] += found
                cell = _cell(pairs[loop, size])
                progress(
                    f"turn {turn + 1} of {repeats}, {loop} {size:g}: "
                    + ", ".join(f"{m} {cell[m]['tokens_per_second']:.0f}/s" for m in MODES)
                    + "".join(f"; over {each} {over(cell, each):.2f}" for each in _RIVALS)
                )
    results: dict[str, Any] = {
        "drafter": drafter,
        "tokens": TOKENS,
        "prompt_lengths": LENGTHS,
        "cores_of_each": len(shares()[0]),
    }
    for (loop, size), runs in pairs.items():
        results.setdefault(loop, {})[f"{size:g}"] = _cell(runs)
    return results


async def _swapped(
    lanes: Sequence[Lane], rivals: Sequence[str], spell: Spell
) -> dict[str, list[_Pair]]:
    """Scheduled decoding beside each rival, before the lanes swap cores and after."""
    found: dict[str, list[_Pair]] = {rival: [] for rival in rivals}
    for places in (shares(), shares()[::-1]):
        for lane, cores in zip(lanes, places, strict=True):
            lane.move(cores)
        for rival in rivals:
            found[rival].append(await _both(lanes, rival, spell))
        rivals = rivals[::-1]
    return found


async def _both(lanes: Sequence[Lane], rival: str, spell: Spell) -> _Pair:
    """The same work in both; who has done it goes on until the other has too."""

    async def each(spell: Spell | None) -> list[Any]:
        orders = zip(lanes, ("scheduled", rival), strict=True)
        return await asyncio.gather(*(lane.do((mode, spell)) for lane, mode in orders))

    scheduled, other = await each(spell)
    await each(None)
    return scheduled, other


@asynccontextmanager
async def _services(
    prompts: Sequence[Prompt], target: Path, drafter: str, dtype: str, schedule: str
) -> AsyncIterator[Worker]:
    """What measures a spell of a mode, against services with such a --schedule."""
    eager = DraftOptions(adaptive=False) if schedule == "off" else None
    services = Services(target, [f"load={drafter}"], dtype, verifier=[f"--schedule={schedule}"])
    with services:
        async with services.client(eager) as client:
            loads = {
                "plain": Load(client, prompts, "none"),
                "fixed": Load(client, prompts, "load", max_nodes=FIXED_NODES),
                "scheduled": Load(client, prompts, "load"),
            }

            async def work(order: tuple[str, Spell | None]) -> dict[str, Any] | None:
                mode, spell = order
                if spell is None:
                    await loads[mode].stop()
                    return None
                return (await loads[mode].run(spell)).summary()

            await work(("scheduled", Spell("closed", 2, 4, 0)))  # warm
            await work(("scheduled", None))
            yield work


def over(cell: Mapping[str, Any], rival: str, quantile: float = 0.5) -> float:
    """Scheduled throughput over that of another mode: the median of the turns' quotients, or
    another quantile."""
    return float(np.quantile(quotients(cell, rival), quantile))


def quotients(cell: Mapping[str, Any], rival: str) -> list[float]:
    """Scheduled throughput over that of another mode at the same time, turn by turn: the geometric
    mean of the two times, before the lanes swapped cores and after."""
    pairs = zip(cell["scheduled"]["beside"][rival], cell[rival]["runs"], strict=True)
    times = [own / its for own, its in pairs]
    return [sqrt(before * after) for before, after in zip(times[::2], times[1::2], strict=True)]


def _cell(pairs: Mapping[str, Sequence[_Pair]]) -> dict[str, Any]:
    """By mode: the window with the median throughput, and the throughput of all, turn by turn."""
    cell = {rival: _middle([its for _, its in runs]) for rival, runs in pairs.items()}
    beside = {rival: [own for own, _ in runs] for rival, runs in pairs.items()}
    scheduled = _middle([run for runs in beside.values() for run in runs])
    scheduled["beside"] = {rival: _rates(runs) for rival, runs in beside.items()}
    return {**cell, "scheduled": scheduled}


def _middle(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ordered = sorted(runs, key=lambda run: float(run["tokens_per_second"]))
    return {**ordered[len(ordered) // 2], "runs": _rates(runs)}


def _rates(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [run["tokens_per_second"] for run in runs]
