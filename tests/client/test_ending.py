"""The early end of a generation, by cancellation, close or failure, releases its cache."""

import asyncio
import gc

import pytest
from fakes.verifier import World, continuation

from paceline.client import Client, ClientClosedError, Generation

PROMPT = [104, 105, 106]
SEED = 5
LONG = 100_000


async def started(client: Client, **options: object) -> tuple[Generation, asyncio.Task[None]]:
    """A long generation in mid-stream, and the task that reads it."""
    generation = client.generate(PROMPT, max_new_tokens=LONG, seed=SEED, **options)  # type: ignore[arg-type]
    reading = asyncio.Event()

    async def read() -> None:
        async for chunk in generation:
            if chunk.round > 1:
                reading.set()

    task = asyncio.create_task(read())
    await reading.wait()
    return generation, task


async def test_cancel_gives_what_there_is(world: World, client: Client) -> None:
    generation, task = await started(client)
    generation.cancel()
    result = await generation
    await task
    assert result.finish_reason == "cancelled"
    assert result.token_ids == continuation(PROMPT, len(result.token_ids), SEED)
    assert result.token_ids
    await world.verifier.all_released()


async def test_cancel_before_the_start_and_after_the_end(world: World, client: Client) -> None:
    generation = client.generate(PROMPT)
    generation.cancel()
    assert (await generation).finish_reason == "cancelled"
    generation = client.generate(PROMPT, max_new_tokens=5)
    result = await generation
    generation.cancel()
    assert (await generation) is result
    assert result.finish_reason == "length"
    assert len(world.verifier.creates) == 1


async def test_cancel_at_any_moment_leaves_no_stream(world: World, client: Client) -> None:
    for moment in range(0, 2400, 100):
        generation = client.generate(PROMPT, max_new_tokens=LONG, seed=SEED)
        task = asyncio.ensure_future(generation)
        for _ in range(moment):
            await asyncio.sleep(0)
        generation.cancel()
        assert (await task).finish_reason == "cancelled"
    # A cache whose answer was on its way when its client left has a lease for that, and no stream.
    verifier = world.verifier
    await verifier.wait_for(lambda: all(not cache.streams for cache in verifier.caches.values()))


@pytest.mark.parametrize("drafter", ["none", "fake"])
async def test_cancelling_the_task_frees_the_cache(
    world: World, client: Client, drafter: str
) -> None:
    _, reader = await started(client, drafter=drafter)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await world.verifier.all_released()
    waiter = asyncio.ensure_future(client.generate(PROMPT, max_new_tokens=LONG))
    starts = len(world.verifier.starts)
    await world.verifier.wait_for(lambda: len(world.verifier.starts) > starts)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await world.verifier.all_released()


async def test_leaving_the_loop_frees_the_cache(world: World, client: Client) -> None:
    async def fail() -> None:
        async for chunk in client.generate(PROMPT, max_new_tokens=LONG, seed=SEED):
            if chunk.round > 2:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    gc.collect()
    await world.verifier.all_released()


async def test_aclose_frees_the_cache_before_it_returns(world: World, client: Client) -> None:
    generation, task = await started(client)
    await generation.aclose()
    assert not world.verifier.caches
    await task
    await generation.aclose()


async def test_a_result_does_not_wait_for_the_release(world: World) -> None:
    """But the end of the client does."""
    world.verifier.may_release.clear()
    async with Client(world.address, cache_dir=None) as client:
        generation = client.generate(PROMPT, max_new_tokens=5)
        await generation
        assert not generation.handle
        assert world.verifier.caches
        world.verifier.may_release.set()
    assert not world.verifier.caches


async def test_closing_the_client_ends_all(world: World) -> None:
    async with Client(world.address, cache_dir=None) as client:
        _, task = await started(client)
        waiting = client.generate(PROMPT)
    with pytest.raises(ClientClosedError):
        await waiting
    with pytest.raises(ClientClosedError):
        await task
    assert not world.verifier.caches
    with pytest.raises(ClientClosedError):
        client.generate(PROMPT)
    with pytest.raises(ClientClosedError):
        await client.model()
    await client.aclose()
