"""The tokens are the same whatever drafters, streams and services do."""

import asyncio

import pytest
from paceline.client import Client

from .fakes import World, continuation

PROMPT = [104, 105, 106]


@pytest.mark.parametrize(
    "mode",
    ["good", "wrong", "empty", "huge", "lengths", "forward", "refusing", "dying", "silent"],
)
async def test_tokens_do_not_depend_on_the_drafter(world: World, client: Client, mode: str) -> None:
    world.drafter.mode = mode
    result = await client.generate(PROMPT, max_new_tokens=150, seed=5)
    assert result.token_ids == continuation(PROMPT, 150, seed=5)
    assert result.finish_reason == "length"
    assert world.drafter.attaches
    assert not world.drafter.out_of_step
    assert not world.verifier.caches


async def test_many_at_once(world: World, client: Client) -> None:
    world.drafter.mode = "good"
    prompts = [[n, n + 1] for n in range(32)]
    results = await asyncio.gather(
        *[client.generate(prompt, max_new_tokens=60, seed=5) for prompt in prompts]
    )
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == continuation(prompt, 60, seed=5)
    assert not world.verifier.caches
