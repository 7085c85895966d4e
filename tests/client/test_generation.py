"""Streaming, awaiting and forking generations."""

import pytest
from fakes.verifier import World, continuation

from paceline.client import Client, InvalidRequestError
from paceline.v1 import sampling_pb2

PROMPT = [104, 105, 106]
SEED = 5


async def test_chunks_make_up_the_result(world: World, client: Client) -> None:
    generation = client.generate(PROMPT, max_new_tokens=120, seed=SEED, logprobs=3)
    chunks = [chunk async for chunk in generation]
    result = await generation
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert result.text == bytes(result.token_ids).decode()
    assert [entry for chunk in chunks for entry in chunk.logprobs] == result.logprobs
    assert all(len(entry.top) == 3 for entry in result.logprobs or ())
    assert [chunk.round for chunk in chunks] == sorted(chunk.round for chunk in chunks)
    assert chunks[-1].round == len(result.stats.rounds)
    for chunk in chunks:
        assert len(chunk.proposed_by) == len(chunk.token_ids) == len(chunk.pieces)
        assert "".join(chunk.pieces) == chunk.text
    drafted = sum(chunk.proposed_by.count("drafter") for chunk in chunks)
    assert drafted == result.stats.accepted > 0


async def test_text_needs_a_tokenizer_tokens_do_not(world: World, client: Client) -> None:
    world.verifier.with_tokenizer = False
    with pytest.raises(InvalidRequestError, match="token ids"):
        await client.generate("text")
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        await client.generate(PROMPT, stop="x")
    result = await client.generate(PROMPT, max_new_tokens=20, seed=SEED)
    assert result.token_ids == continuation(PROMPT, 20, SEED)
    assert result.text == ""


@pytest.mark.parametrize("drafter", ["none", "fake"])
@pytest.mark.parametrize("span", [1, 2, 5])
async def test_a_stop_string_ends_text_and_tokens(
    world: World, client: Client, drafter: str, span: int
) -> None:
    """It may span tokens (each is one character here) and lie among accepted drafted ones."""
    text = bytes(continuation(PROMPT, 120, SEED)).decode()
    stop = text[60 : 60 + span]
    end = text.index(stop) + span
    result = await client.generate(
        PROMPT, max_new_tokens=120, seed=SEED, stop=stop, drafter=drafter, logprobs=True
    )
    assert result.finish_reason == "stop"
    assert result.stop_string == stop
    assert result.text == text[: end - span]
    assert result.token_ids == continuation(PROMPT, end, SEED)
    assert len(result.logprobs or ()) == end
    assert result.usage.completion_tokens == end
    await world.verifier.all_released()


async def test_a_stop_string_that_does_not_complete_is_text(client: Client) -> None:
    text = bytes(continuation(PROMPT, 40, SEED)).decode()
    result = await client.generate(
        PROMPT, max_new_tokens=40, seed=SEED, stop=[text[38:] + "!", "never"]
    )
    assert result.finish_reason == "length"
    assert result.stop_string is None
    assert result.text == text


async def test_prefill_progress_is_reported(client: Client) -> None:
    told: list[tuple[int, int]] = []
    await client.generate([1] * 10, max_new_tokens=2, on_prefill=lambda *now: told.append(now))
    assert told == [(5, 10), (10, 10)]


async def test_a_generation_can_be_iterated_once(client: Client) -> None:
    generation = client.generate(PROMPT, max_new_tokens=5)
    await generation
    with pytest.raises(RuntimeError, match="iterate before"):
        aiter(generation)


@pytest.mark.parametrize("drafter", ["none", "fake"])
@pytest.mark.parametrize(("window", "merged"), [(1, 1), (4, 1), (32, 5)])
async def test_the_verifier_runs_no_further_ahead_than_the_window(
    world: World, drafter: str, window: int, merged: int
) -> None:
    world.verifier.merged = merged
    async with Client(world.address, cache_dir=None, unread_chunks=window) as client:
        generation = client.generate(PROMPT, max_new_tokens=200, seed=SEED, drafter=drafter)
        tokens: list[int] = []
        taken = 0

        def used_up() -> bool:
            fake, batch = world.verifier, max(1, window // 4)
            return fake.steps == fake.granted > taken + window - batch

        async for chunk in generation:
            tokens += chunk.token_ids
            taken += generation.stats.rounds[chunk.round - 1].steps if chunk.round else 0
            if chunk.round < 3:
                await world.verifier.wait_for(used_up)
            assert world.verifier.steps <= taken + window
    assert tokens == continuation(PROMPT, 200, SEED)


async def test_a_caller_that_awaits_grants_all_steps(world: World, client: Client) -> None:
    await client.generate(PROMPT, max_new_tokens=400, seed=SEED)
    assert world.verifier.granted == 399
    assert not world.verifier.pauses


async def test_awaiting_in_mid_stream_does_not_wait_for_the_reader(world: World) -> None:
    async with Client(world.address, cache_dir=None, unread_chunks=2) as client:
        generation = client.generate(PROMPT, max_new_tokens=400, seed=SEED)
        async for _ in generation:
            result = await generation
            break
    assert result.token_ids == continuation(PROMPT, 400, SEED)


async def test_a_kept_cache_is_a_parent_until_it_is_closed(world: World, client: Client) -> None:
    world.verifier.lease_ms = 60
    parent = client.generate(PROMPT, max_new_tokens=20, seed=SEED, keep_cache=True)
    first = await parent
    assert len(world.verifier.caches) == 1
    await world.verifier.wait_for(lambda: world.verifier.renewals >= 3)
    child = await client.generate(
        [*PROMPT, *first.token_ids], max_new_tokens=5, seed=SEED, parent=parent
    )
    assert child.token_ids == continuation([*PROMPT, *first.token_ids], 5, SEED)
    assert child.usage.reused_tokens == 7
    assert world.verifier.creates[1].parent_handle == parent.handle
    await parent.aclose()
    await world.verifier.all_released()
    assert parent.handle == b""


async def test_an_unknown_parent_is_prefilled_again(client: Client) -> None:
    result = await client.generate(PROMPT, max_new_tokens=5, seed=SEED, parent=b"\1" * 16)
    assert result.token_ids == continuation(PROMPT, 5, SEED)
    assert result.usage.reused_tokens == 0


async def test_parameters_reach_the_verifier(world: World, client: Client) -> None:
    sampling = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5,
        "presence_penalty": -0.5, "frequency_penalty": 0.5, "logit_bias": {7: -2.0},
        "seed": 2**64 - 1,
    }  # fmt: skip
    others = {"max_new_tokens": 5, "stop_token_ids": [9], "ignore_eos": True}
    await client.generate(PROMPT, logprobs=4, **sampling, **others)  # type: ignore[arg-type]
    (request,) = world.verifier.creates
    assert request.sampling == sampling_pb2.SamplingParams(
        **sampling, mode=sampling_pb2.ACCEPTANCE_MODE_INVARIANT
    )
    assert {name: getattr(request, name) for name in others} == others
    assert (request.logprobs, request.top_logprobs) == (True, 4)
