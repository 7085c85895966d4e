"""Swaps versions of a drafter under load."""

from __future__ import annotations

import asyncio
import statistics
import time

from paceline.bench.drills.drill import Drill, Outcome
from paceline.bench.drills.world import Services, World, growth
from paceline.v1 import drafter_pb2

_GROWTH_BYTES = 32 << 20  # less than the weights of two versions


async def swap(world: World) -> Outcome:
    """Load a version, route all generations to it, unload the one before; again and again."""
    outcome = Outcome()
    swaps = world.scale.swaps
    seconds: list[float] = []
    early: list[int] = []
    async with world.services([f"x={world.lm}"]) as services:
        verifier = services.verifier.pid
        async with services.load() as load:
            # Buffers for the numbers of rows that occur are allocated once and stay.
            await load.more(4 * world.scale.generations)
            for number in range(swaps):
                begun = time.monotonic()
                await _swap(services, world, number)
                seconds.append(time.monotonic() - begun)
                await load.more(max(1, world.scale.generations // 4))
                if number == swaps // 5:
                    early = await _memory(services)
            growth(early, await _memory(services), _GROWTH_BYTES, outcome)
        load.report(outcome)
        versions = [drafter.version for drafter in (await _listed(services)).drafters]
        outcome.checks["only the last version is left"] = versions == [str(swaps + 1)]
        outcome.checks["verifier not restarted"] = (
            services.verifier.pid == verifier and services.verifier.returncode is None
        )
        outcome.checks["most versions drafted"] = len(load.versions) > swaps // 2
        await services.end(outcome)
    outcome.figures |= {
        "swaps": swaps,
        "median seconds a swap": round(statistics.median(seconds), 3),
        "versions that drafted": len(load.versions),
    }
    return outcome


async def _swap(services: Services, world: World, number: int) -> None:
    """Every third version is of a method without weights."""
    request = drafter_pb2.LoadDrafterRequest(name="x", method="ngram", activate=True)
    if number % 3 != 2:
        request.method, request.folder = "lm", str(world.target)
        request.options["widths"] = "1,1,1"
    loaded = await services.registry.LoadDrafter(request)
    before = str(int(loaded.drafter.version) - 1)
    await services.registry.UnloadDrafter(
        drafter_pb2.UnloadDrafterRequest(name="x", version=before)
    )


async def _memory(services: Services) -> list[int]:
    """Least memory of both services over two seconds with one version loaded, without the
    temporary buffers of steps."""
    while len((await _listed(services)).drafters) > 1:  # noqa: ASYNC110 - the service moves streams
        await asyncio.sleep(0.05)
    least = services.memory()
    for _ in range(20):
        await asyncio.sleep(0.1)
        least = list(map(min, least, services.memory()))
    return least


async def _listed(services: Services) -> drafter_pb2.ListDraftersResponse:
    request = drafter_pb2.ListDraftersRequest()
    response: drafter_pb2.ListDraftersResponse = await services.registry.ListDrafters(request)
    return response


DRILLS = [
    Drill("swap", "versions with and without weights replace each other while texts stream", swap),
]
