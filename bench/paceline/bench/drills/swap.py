"""Swaps versions of a drafter under load."""

from __future__ import annotations

import asyncio
import statistics
import time

from paceline.bench.drills.drill import Drill, Outcome
from paceline.bench.drills.world import Services, World, anonymous_bytes
from paceline.v1 import drafter_pb2

_GROWTH_BYTES = 32 << 20
"""What memory may differ between a fifth of the swaps and all of them: less than the weights of two
versions."""


async def swap(world: World) -> Outcome:
    """Load a version, send everything to it, unload the one before; again and again."""
    outcome = Outcome()
    swaps = world.scale.swaps
    seconds: list[float] = []
    async with world.services([f"x={world.lm}"]) as services:
        verifier = services.verifier.pid
        early = (0, 0)
        async with services.load() as load:
            # Kernels are compiled for the numbers of rows that occur, and stay: no swap's doing.
            await load.more(4 * world.scale.generations)
            for number in range(swaps):
                begun = time.monotonic()
                await _swap(services, world, number)
                seconds.append(time.monotonic() - begun)
                await load.more(max(1, world.scale.generations // 4))
                if number == swaps // 5:
                    early = await _memory(services)
            late = await _memory(services)
        load.judge(outcome)
        growth = [after - before for before, after in zip(early, late, strict=True)]
        listed = await _listed(services)
        outcome.checks["only the last version is left"] = [
            drafter.version for drafter in listed.drafters
        ] == [str(swaps + 1)]
        outcome.checks["verifier not restarted"] = (
            services.verifier.pid == verifier and services.verifier.returncode is None
        )
        outcome.checks[f"memory grew by less than {_GROWTH_BYTES >> 20} MiB"] = (
            max(growth) < _GROWTH_BYTES
        )
        outcome.checks["versions took turns"] = len(load.versions) > swaps // 2
        await services.end(outcome)
    outcome.figures |= {
        "swaps": swaps,
        "median seconds a swap": round(statistics.median(seconds), 3),
        "versions that drafted": len(load.versions),
        "verifier grew by MiB": round(growth[0] / 2**20, 1),
        "drafter grew by MiB": round(growth[1] / 2**20, 1),
        "drafter MiB": round(late[1] / 2**20, 1),
    }
    return outcome


async def _swap(services: Services, world: World, number: int) -> None:
    """Every third version is of a method without weights."""
    ngram = number % 3 == 2
    options = {} if ngram else {"widths": "1,1,1"}
    loaded = await services.registry.LoadDrafter(
        drafter_pb2.LoadDrafterRequest(
            name="x",
            method="ngram" if ngram else "lm",
            folder="" if ngram else str(world.target),
            options=options,
            activate=True,
        )
    )
    before = str(int(loaded.drafter.version) - 1)
    await services.registry.UnloadDrafter(
        drafter_pb2.UnloadDrafterRequest(name="x", version=before)
    )


async def _memory(services: Services) -> tuple[int, int]:
    """Memory of verifier and drafter with one version loaded: the least of some moments, since
    steps come and go."""
    while len((await _listed(services)).drafters) > 1:  # noqa: ASYNC110 - the service moves streams
        await asyncio.sleep(0.05)
    pids = services.verifier.pid, services.drafter.pid
    least = [anonymous_bytes(pid) for pid in pids]
    for _ in range(20):
        await asyncio.sleep(0.1)
        least = [min(had, anonymous_bytes(pid)) for had, pid in zip(least, pids, strict=True)]
    return least[0], least[1]


async def _listed(services: Services) -> drafter_pb2.ListDraftersResponse:
    request = drafter_pb2.ListDraftersRequest()
    response: drafter_pb2.ListDraftersResponse = await services.registry.ListDrafters(request)
    return response


DRILLS = [
    Drill("swap", "versions with and without weights take turns while texts stream", swap),
]
