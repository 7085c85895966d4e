"""Kills one of three verifiers, drains another and adds a fourth, while texts stream."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from paceline.bench.drills.load import Load, Outcome
from paceline.bench.drills.world import Drill, World
from paceline.client import Client

_GENERATIONS = 3  # at a time, as a multiple of those of other drills


async def three_verifiers(world: World) -> Outcome:
    """Every text goes on elsewhere with the same tokens."""
    outcome = Outcome()
    concurrency = _GENERATIONS * world.scale.generations
    async with AsyncExitStack() as stack:
        killed, drained, added = others = [
            await stack.enter_async_context(world.verifier_process()) for _ in range(3)
        ]
        services = await stack.enter_async_context(world.services(others=others))
        kept, client = services.verifier, services.client
        addresses = f"{kept.address},{killed.address},{drained.address}"
        client.set_verifiers(addresses)
        # It reads one token at a time, so that its generation has not ended when its verifier does.
        slow = await stack.enter_async_context(Client(killed.address, unread_chunks=1))
        async with services.load(concurrency=concurrency) as load:
            await load.more(3 * concurrency)  # texts that end at once may all go to one
            outcome.figures["slowest stall undisturbed s"] = _stall(load)
            outcome.checks["all three served"] = len(load.verifiers) == 3
            text = world.texts[0]
            held = slow.generate(
                text.prompt,
                max_new_tokens=len(text.expected),
                temperature=1.0,
                seed=text.seed,
                ignore_eos=True,
                drafter="none",
            )
            chunks = aiter(held)
            await anext(chunks)
            slow.set_verifiers(addresses)
            await asyncio.to_thread(killed.kill)
            await load.more(concurrency)
            async for _ in chunks:
                pass
            result = await held
            moved = result.stats.fallbacks["verifier_moved"] > 0
            outcome.checks["texts of the killed one moved"] = moved
            outcome.checks["with the same tokens"] = result.token_ids == text.expected
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


DRILLS = [Drill("three verifiers", "one is killed, one drained and one added", three_verifiers)]
