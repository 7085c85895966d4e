"""Generate: streams may break, a newer stream takes over, and no token is lost or repeated."""

import asyncio
import random
from typing import Any

import drafters
import grpc
import pytest
from calls import refusal, until
from verifier_support import Client, Clock, Serve, paused_engine, tokens_of

from paceline.v1 import sampling_pb2, verifier_pb2

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
FIELDS: dict[str, Any] = {"max_new_tokens": 300, "ignore_eos": True}
NOT_FOUND = (grpc.StatusCode.NOT_FOUND, "CACHE_NOT_FOUND")


@pytest.fixture
async def handle(client: Client) -> bytes:
    created = await client.create(PROMPT, **FIELDS)
    assert created.first.committed_length == len(PROMPT)
    return bytes(created.handle)


def granted(credits: int) -> verifier_pb2.GenerateRequest:
    return verifier_pb2.GenerateRequest(credits=credits)


@pytest.mark.parametrize("earlier", [0, 5])
async def test_a_resume_anywhere_loses_and_repeats_nothing(earlier: int, client: Client) -> None:
    """Streams of a few steps, each from any position that the client may have, with and without
    trees; log-probabilities are sent again as they were. The first tokens are of another cache."""
    sampling = sampling_pb2.SamplingParams(
        temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, seed=3
    )
    fields: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 80, "ignore_eos": True}
    plain = await client.generate(PROMPT, None, **fields)
    created = await client.create(PROMPT, output_tokens=plain[:earlier], top_logprobs=3, **fields)
    assert list(created.first.tokens) == [plain[earlier]]
    names = [
        "none",
        await client.drafter_service.add(drafters.scattered(plain, len(PROMPT))),
        await client.drafter_service.add(drafters.random_tree),
    ]
    sent = {earlier: (created.first.logprobs[0], created.first.top_logprobs[0])}
    rng, position, emitted = random.Random(earlier), earlier, earlier + 1
    while emitted < len(plain):
        position, steps = rng.randint(earlier, emitted), rng.randint(1, 4)
        first, ran = position, 0
        for response in await client.steps(
            created.handle, steps, position, drafter=rng.choice(names)
        ):
            result, ran = response.result, ran + response.steps
            assert response.position == position
            for at, token in enumerate(result.tokens, position):
                assert token == plain[at]
                logprobs = (result.logprobs[at - position], result.top_logprobs[at - position])
                assert sent.setdefault(at, logprobs) == logprobs
            assert result.committed_length == len(PROMPT) + position + len(result.tokens) - 1
            position += len(result.tokens)
        assert position >= emitted, "the client has all that was emitted"
        assert ran == steps or position == len(plain)
        assert position > first
        emitted = position
    assert [list(each[1].tokens) != [] for each in sent.values()] == [True] * (80 - earlier)


async def test_positions_that_the_verifier_cannot_continue_from(client: Client) -> None:
    created = await client.create(PROMPT, output_tokens=[1, 2, 3], **FIELDS)
    failed = grpc.StatusCode.FAILED_PRECONDITION
    for position in (5, 2**32 - 1, 0, 2):
        reason = "POSITION_AHEAD" if position > 3 else "POSITION_LOST"
        assert await client.refusal(created.handle, position) == (failed, reason)
    assert len(await client.rest(created.handle, 3)) == 297
    assert len(await client.rest(created.handle, 300)) == 0


async def test_a_finished_generation_sends_what_the_client_lacks(client: Client) -> None:
    created = await client.create(PROMPT, max_new_tokens=9, ignore_eos=True)
    tokens = [*created.first.tokens, *await client.rest(created.handle)]
    for position in range(10):
        responses = await client.responses(created.handle, position)
        assert tokens_of(responses) == tokens[position:]
        assert len(responses) == (position < 9)
        for response in responses:
            assert response.steps == 0
            assert response.result.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    (cache,) = client.service.store
    assert not cache.busy


async def test_rounds_carry_the_time_of_a_plain_step_once_it_was_measured(serve: Serve) -> None:
    async with serve(schedule="auto") as client:
        created = await client.create(PROMPT, **FIELDS)
        first, *_, last = await client.responses(created.handle, drafter="none")
        assert not first.plain_us
        assert last.plain_us


async def test_credits_are_steps(client: Client, handle: bytes) -> None:
    """None runs none, n run n, and later ones continue."""
    (cache,) = client.service.store
    call = await client.begin(handle)
    await until(lambda: cache.busy)
    await client.service.engine.between_steps(lambda: None)
    assert cache.sequence.text.output_length == 1
    ran = 1
    for credits in (1, 5, 0, 40):
        await call.write(granted(credits))
        while ran < cache.sequence.text.output_length + credits and credits:
            response = await call.read()
            ran, credits = ran + response.steps, credits - response.steps
        await client.service.engine.between_steps(lambda: None)
        assert cache.sequence.text.output_length == ran
    assert ran == 47
    for _ in range(3):  # more than can be used
        await call.write(granted(2**32 - 1))
    while not response.result.finish_reason:
        response = await call.read()
        ran += response.steps
    assert ran == 300
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_a_credit_comes_while_a_tree_is_on_its_way(client: Client, handle: bytes) -> None:
    service = client.drafter_service
    name = await service.add(drafters.nothing)
    service.paused = []
    call = await client.begin(handle, credits=1, drafter=name)
    await until(lambda: bool(service.paused))
    await call.write(granted(1))
    await service.answer()
    steps = 0
    while steps < 2:  # plain steps may be merged
        round_ = await call.read()
        assert round_.position == 1 + steps
        assert round_.no_draft == verifier_pb2.NO_DRAFT_REASON_EMPTY
        steps += round_.steps
    assert steps == 2


async def test_taking_over_in_the_middle_of_steps(client: Client) -> None:
    plain = await client.generate(PROMPT, None, **FIELDS)
    created = await client.create(PROMPT, **FIELDS)
    with paused_engine(after=5):
        streams = [await client.begin(created.handle, credits=300)]
        seen = (await streams[0].read()).result.tokens
        for _ in range(3):
            streams.append(await client.begin(created.handle))
            superseded = (grpc.StatusCode.ABORTED, "STREAM_SUPERSEDED")
            assert await refusal(streams[-2]) == superseded
    stored = await streams[-1].read()
    tokens = list(stored.result.tokens)
    assert stored.steps == 0
    assert tokens[: len(seen)] == seen
    assert len(tokens) < 10, "the steps ended with their stream"
    streams[-1].cancel()
    rest = await client.rest(created.handle, 1 + len(tokens))
    assert [*created.first.tokens, *tokens, *rest] == plain


async def test_a_broken_stream_ends_its_steps(client: Client, handle: bytes) -> None:
    (cache,) = client.service.store
    with paused_engine(after=5):
        call = await client.begin(handle, credits=300)
        await call.read()
        call.cancel()
        await until(lambda: cache.stream is None)
    await until(lambda: not cache.busy)
    emitted = cache.sequence.text.output_length
    assert emitted < 10
    assert len(await client.rest(handle, emitted)) == 300 - emitted


async def test_a_broken_stream_ends_its_wait_for_a_tree(client: Client, handle: bytes) -> None:
    (cache,), service = client.service.store, client.drafter_service
    name = await service.add(drafters.nothing)
    service.paused = []
    call = await client.begin(handle, credits=1, drafter=name)
    await until(lambda: bool(service.paused))
    call.cancel()
    await until(lambda: not service.sequences)
    await until(lambda: not cache.busy)
    assert cache.sequence.text.output_length == 1


async def test_a_client_that_ends_its_side_gets_what_it_has_credits_for(
    client: Client, handle: bytes
) -> None:
    call = await client.begin(handle, credits=300)
    await call.done_writing()
    assert len(tokens_of([response async for response in call])) == 299


@pytest.mark.parametrize("waits_for", ["credits", "a tree", "a step"])
async def test_a_release_ends_the_stream(waits_for: str, client: Client, handle: bytes) -> None:
    service = client.drafter_service
    name = await service.add(drafters.nothing)
    service.paused = []
    (cache,) = client.service.store
    if waits_for == "a step":
        with paused_engine(after=0) as paused:
            call = await client.begin(handle, credits=300)
            await paused()
            releasing = asyncio.create_task(client.release(handle))
            await until(lambda: cache.released)
        assert await releasing
    else:
        call = await client.begin(handle, credits=int(waits_for == "a tree"), drafter=name)
        await until(lambda: cache.busy and bool(service.paused or waits_for == "credits"))
        assert await client.release(handle)
    assert not await client.release(handle), "releasing twice is safe"
    assert await refusal(call) == NOT_FOUND
    assert await client.refusal(handle) == NOT_FOUND
    await client.service.check_integrity()


async def test_unknown_handles_and_empty_streams(client: Client) -> None:
    assert await client.refusal(bytes(16)) == NOT_FOUND
    call = client.stub.Generate()
    await call.done_writing()
    assert [message async for message in call] == []


async def test_a_lease_lasts_as_long_as_its_stream(serve: Serve) -> None:
    """Also while the stream has no credits."""
    clock = Clock()
    async with serve(lease_seconds=0.3, clock=clock) as client:
        created = await client.create(PROMPT, **FIELDS)
        (cache,) = client.service.store
        call = await client.begin(created.handle)
        await until(lambda: cache.busy)
        for _ in range(2):
            clock.now += 100
            assert await client.service.store.sweep() == 0
        await call.write(granted(1))
        assert (await call.read()).steps == 1
        call.cancel()
        await until(lambda: cache.stream is None)
        clock.now += 0.2
        renewed = await client.stub.RenewLease(
            verifier_pb2.RenewLeaseRequest(handle=created.handle)
        )
        assert (renewed.lease_ms, renewed.epoch) == (300, created.epoch)
        clock.now += 0.2
        await client.service.store.sweep()
        assert not cache.released
        clock.now += 0.3
        await until(lambda: len(client.service.store) == 0)
        assert await client.refusal(created.handle) == NOT_FOUND
