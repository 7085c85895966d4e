"""Kills one of three verifiers, drains another and adds a fourth, while texts stream."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from paceline.bench.drills.drill import Drill, Outcome
from paceline.bench.drills.load import Load
from paceline.bench.drills.world import World

_GENERATIONS = 3  # at a time, as a multiple of those of other drills


async def three_verifiers(world: World) -> Outcome:
    """Every text goes on elsewhere with the same tokens."""
    outcome = Outcome()
    concurrency = _GENERATIONS * world.scale.generations
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(world.services())
        killed, drained, added = [
            await stack.enter_async_context(world.verifier_process()) for _ in range(3)
        ]
        kept, client = services.verifier, services.client
        client.set_verifiers(f"{kept.address},{killed.address},{drained.address}")
        async with services.load(concurrency=concurrency) as load:
            await load.more(concurrency)
            outcome.figures["slowest stall undisturbed s"] = _stall(load)
            outcome.checks["all three served"] = len(load.verifiers) == 3
            await asyncio.to_thread(killed.kill)
            await load.more(concurrency)
            outcome.checks["texts of the killed one moved"] = load.fallbacks["verifier_moved"] > 0
            outcome.figures["slowest stall after the kill s"] = _stall(load)
            code = await asyncio.to_thread(drained.terminate)
            outcome.checks["the drained one finished its texts"] = code == 0
            await load.more(concurrency)
            outcome.figures["slowest stall after the drain s"] = _stall(load)
            client.set_verifiers(f"{kept.address},{added.address}")
            await load.more(concurrency)
            outcome.figures["slowest stall after the addition s"] = _stall(load)
        load.report(outcome)
        outcome.checks["the added one served"] = added.address in load.verifiers
        code = await asyncio.to_thread(added.terminate)
        outcome.checks["the added one's counts balance"] = code == 0
        await services.end(outcome)
    outcome.figures["generations at a time"] = concurrency
    return outcome


def _stall(load: Load) -> float:
    """The longest time between two chunks of a text since the last call. Unit: seconds."""
    stall, load.slowest_stall = load.slowest_stall, 0.0
    return round(stall, 2)


DRILLS = [
    Drill("three verifiers", "one is killed, one drained and one added", three_verifiers),
]
