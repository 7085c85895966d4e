"""The tokens are the same whatever drafters do; only speed and statistics differ."""

import asyncio
from itertools import pairwise

import pytest

from paceline.client import Client

from .conftest import quick_client
from .fake_target import continuation
from .world import World

PROMPT = [104, 105, 106]
SEED = 5
LONG = 100_000
MODES = ["good", "wrong", "empty", "huge", "lengths", "forward", "refusing", "dying", "silent"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("length", "adaptive"), [(1, False), (2, False), (150, False), (150, True)]
)
async def test_tokens_do_not_depend_on_the_drafter(
    world: World, mode: str, length: int, adaptive: bool
) -> None:
    world.drafter.mode = mode
    timeout = 0.02 if mode == "silent" else 60.0
    async with quick_client(world, adaptive=adaptive, timeout=timeout) as client:
        result = await client.generate(PROMPT, max_new_tokens=length, seed=SEED)
    assert result.token_ids == continuation(PROMPT, length, SEED)
    assert result.finish_reason == "length"
    assert result.usage.total_tokens == len(PROMPT) + length
    assert sum(entry.emitted for entry in result.stats.rounds) == length - 1
    assert not world.drafter.out_of_step
    assert not world.verifier.caches
    if length > 100 and mode != "silent" and not adaptive:
        assert world.drafter.attaches


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("huge", "malformed_tree"),
        ("lengths", "malformed_tree"),
        ("forward", "invalid_tree"),
        ("refusing", "drafter_refused"),
        ("dying", "drafter_unavailable"),
    ],
)
async def test_fallbacks_are_counted_by_reason(
    world: World, eager: Client, mode: str, reason: str
) -> None:
    world.drafter.mode = mode
    result = await eager.generate(PROMPT, max_new_tokens=100, seed=SEED)
    assert result.stats.fallbacks[reason] >= 1
    assert set(result.stats.fallbacks) == {reason}


async def test_answers_to_rounds_not_asked_for_are_dropped(world: World, eager: Client) -> None:
    world.drafter.mode = "stray"
    world.verifier.strays = True
    result = await eager.generate(PROMPT, max_new_tokens=100, seed=SEED)
    assert result.token_ids == continuation(PROMPT, 100, SEED)
    assert result.stats.accepted > 0
    assert not result.stats.fallbacks


async def test_without_speculation(world: World, client: Client) -> None:
    result = await client.generate(PROMPT, max_new_tokens=150, seed=SEED, drafter="none")
    assert result.token_ids == continuation(PROMPT, 150, SEED)
    assert not world.drafter.attaches
    assert result.stats.drafted_rounds == 0
    assert result.stats.free_run_tokens == 149
    assert len(result.stats.rounds) == 3
    async with Client(world.addresses[0], cache_dir=None) as plain:
        again = await plain.generate(PROMPT, max_new_tokens=150, seed=SEED)
    assert again.token_ids == result.token_ids


async def test_a_good_drafter_is_believed(world: World, eager: Client) -> None:
    result = await eager.generate(PROMPT, max_new_tokens=100, seed=SEED, drafter="fake")
    stats = result.stats
    assert stats.drafted_rounds == 20
    assert stats.mean_accepted_length == pytest.approx(stats.mean_accepted_drafts + 1, abs=0.2)
    assert stats.accepted_per_position[0] == stats.drafted_rounds
    assert sum(stats.accepted_per_position) == stats.accepted
    assert len(stats.accepted_per_position) == 4
    assert stats.drafter_versions == ["fake@1"]
    assert stats.summary()["accepted"] == stats.accepted
    for entry in stats.rounds:
        parts = entry.draft_ms + entry.verify_ms + entry.queue_ms + entry.transport_ms
        assert parts >= entry.round_ms * 0.999


async def test_a_drafter_is_told_what_it_needs(world: World, eager: Client) -> None:
    await eager.generate(
        PROMPT, max_new_tokens=40, seed=SEED, temperature=0.5, drafter="by-name", top_k=7
    )
    attach = world.drafter.attaches[0]
    assert attach.drafter == "by-name"
    assert attach.target_fingerprint == world.verifier.fingerprint
    assert list(attach.tokens[:3]) == PROMPT
    assert attach.prompt_length == 3
    assert attach.sampling.seed == SEED
    assert attach.sampling.top_k == 7
    assert len(attach.read_grant) == 16
    assert attach.verifier_address == world.addresses[0]


async def test_the_first_round_waits_for_the_drafter_if_every_round_drafts(
    world: World, eager: Client
) -> None:
    world.drafter.may_attach.clear()
    running = asyncio.ensure_future(eager.generate(PROMPT, max_new_tokens=100, seed=SEED))
    async with asyncio.timeout(60):
        while not world.drafter.attaches:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for _ in range(10):
        await asyncio.sleep(0.01)
        assert not world.verifier.rounds
    world.drafter.may_attach.set()
    stats = (await running).stats
    assert stats.drafted_rounds == len(stats.rounds) == 20


async def test_a_slow_drafter_is_not_waited_for(world: World) -> None:
    """It is asked for no other tree. The late one is dropped, and the drafter is used again."""
    world.drafter.may_draft.clear()
    async with quick_client(world, adaptive=False, timeout=0.02) as client:
        tokens: list[int] = []
        generation = client.generate(PROMPT, max_new_tokens=LONG, seed=SEED)
        async for chunk in generation:
            tokens += chunk.token_ids
            if generation.stats.fallbacks["drafter_timeout"] and len(tokens) > 100:
                if not world.drafter.may_draft.is_set():
                    assert world.drafter.asked == 1
                world.drafter.may_draft.set()
            if world.drafter.asked > 10:
                break
    assert tokens == continuation(PROMPT, len(tokens), SEED)
    assert len(world.drafter.attaches) == 1
    assert not world.drafter.out_of_step


async def test_a_drafter_that_comes_back_is_attached_again(world: World, eager: Client) -> None:
    tokens: list[int] = []
    generation = eager.generate(PROMPT, max_new_tokens=LONG, seed=SEED)
    losses = generation.stats.fallbacks
    async for chunk in generation:
        tokens += chunk.token_ids
        if not losses and len(tokens) > 50:
            await world.drafter_service.stop()
        if losses["drafter_unavailable"] >= 2 and not world.drafter_service.running:
            await world.drafter_service.start()
        if len(world.drafter.attaches) > 1:
            break
    assert tokens == continuation(PROMPT, len(tokens), SEED)
    assert len(world.drafter.attaches[-1].tokens) > 50
    assert not world.drafter.out_of_step


async def test_a_zero_node_budget_sends_no_tree(world: World, client: Client) -> None:
    world.verifier.node_budget = 0
    result = await client.generate(PROMPT, max_new_tokens=100, seed=SEED)
    assert result.token_ids == continuation(PROMPT, 100, SEED)
    trees = [len(request.tree.tokens) for request in world.verifier.rounds]
    assert sum(1 for nodes in trees if nodes) <= 1


async def test_chunks_say_why_they_were_not_drafted(world: World, eager: Client) -> None:
    async def reasons(client: Client, drafter: str | None = None) -> set[str | None]:
        generation = client.generate(PROMPT, max_new_tokens=100, seed=SEED, drafter=drafter)
        first, *chunks = [chunk async for chunk in generation]
        assert first.undrafted is None
        assert all((chunk.tree is None) == (chunk.undrafted is not None) for chunk in chunks)
        return {chunk.undrafted for chunk in chunks}

    assert await reasons(eager) <= {None, "last_token"}
    assert await reasons(eager, "none") == {"no_drafter"}
    world.drafter.mode = "empty"
    assert await reasons(eager) <= {"empty", "last_token"}
    world.drafter.mode = "silent"
    async with quick_client(world, adaptive=False, timeout=0.02) as impatient:
        assert "late" in await reasons(impatient)
    world.drafter.mode = "refusing"
    assert "not_ready" in await reasons(eager)
    world.verifier.node_budget = 0
    async with quick_client(world, adaptive=True) as adaptive:
        assert "node_budget" in await reasons(adaptive)


async def test_budgets_bound_the_tree(world: World, eager: Client) -> None:
    await eager.generate(PROMPT, max_new_tokens=60, seed=SEED, max_nodes=3)
    await eager.generate(PROMPT, max_new_tokens=60, seed=SEED)
    sizes = {len(request.tree.tokens) for request in world.verifier.rounds}
    assert 3 in sizes
    assert 8 in sizes


async def test_many_at_once(world: World, client: Client) -> None:
    prompts = [[n, n + 1] for n in range(32)]
    results = await asyncio.gather(
        *[client.generate(prompt, max_new_tokens=60, seed=SEED) for prompt in prompts]
    )
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == continuation(prompt, 60, SEED)
    assert not world.verifier.caches


async def test_a_seed_is_drawn_and_reported(world: World, client: Client) -> None:
    first = await client.generate(PROMPT, max_new_tokens=30)
    second = await client.generate(PROMPT, max_new_tokens=30)
    again = await client.generate(PROMPT, max_new_tokens=30, seed=first.seed)
    assert first.seed != second.seed
    assert again.token_ids == first.token_ids != second.token_ids


async def test_rounds_carry_what_is_left_of_the_deadline(world: World, client: Client) -> None:
    await client.generate(PROMPT, max_new_tokens=60, seed=SEED, deadline=60)
    left = [request.deadline_ms for request in world.verifier.rounds]
    assert all(0 < later <= earlier <= 60_000 for earlier, later in pairwise(left))


async def test_a_hung_drafter_service_costs_no_generation(world: World) -> None:
    """Its address takes connections and never says a word."""
    silent = await asyncio.start_unix_server(
        lambda *_: asyncio.sleep(60), path=str(world.drafter_service.address[5:]) + "-silent"
    )
    async with (
        silent,
        Client(
            world.addresses[0],
            drafter=world.drafter_service.address + "-silent",
            cache_dir=None,
        ) as client,
    ):
        result = await client.generate(PROMPT, max_new_tokens=100, seed=SEED)
    assert result.token_ids == continuation(PROMPT, 100, SEED)
