"""Rounds are idempotent, streams may break, and a newer stream takes over."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import drafters
import grpc
import pytest
from verifier_support import VOCAB, Client, Round, failure, held_up, reason_of, until

from paceline.tree import TokenTree
from paceline.v1 import sampling_pb2, verifier_pb2

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
FIELDS: dict[str, Any] = {"max_new_tokens": 300, "ignore_eos": True}


@pytest.fixture
async def handle(client: Client) -> bytes:
    created = await client.create(PROMPT, **FIELDS)
    assert created.first.committed_length == len(PROMPT)
    return bytes(created.handle)


async def test_a_repeated_round_gets_the_stored_answer(client: Client, handle: bytes) -> None:
    (first,) = await client.verify(Round.of(handle, 1, TokenTree((1, 2, 3), (-1, 0, 0))))
    (again,) = await client.verify(Round.of(handle, 1))
    assert again == first
    assert again.last
    (second,) = await client.verify(Round.of(handle, 2))
    assert second.result.committed_length > first.result.committed_length


async def test_a_repeated_free_run_gets_all_of_its_tokens(client: Client, handle: bytes) -> None:
    messages = await client.verify(Round.of(handle, 1, free_run_steps=50))
    assert [message.last for message in messages] == [False] * (len(messages) - 1) + [True]
    tokens = [token for message in messages for token in message.result.tokens]
    assert len(tokens) == 50
    (again,) = await client.verify(Round.of(handle, 1, free_run_steps=50))
    assert again.result.tokens == tokens
    assert again.last
    assert again.verify_us == sum(message.verify_us for message in messages)


async def test_rounds_out_of_order(client: Client, handle: bytes) -> None:
    for number in (1, 2, 3):
        await client.verify(Round.of(handle, number))
    failed = grpc.StatusCode.FAILED_PRECONDITION
    assert await client.refusal(Round.of(handle, 2)) == (failed, "STALE_ROUND")
    assert await client.refusal(Round.of(handle, 0)) == (failed, "STALE_ROUND")
    assert await client.refusal(Round.of(handle, 5)) == (failed, "ROUND_GAP")
    assert len(await client.verify(Round.of(handle, 4))) == 1


async def test_finished(client: Client) -> None:
    created = await client.create(PROMPT, max_new_tokens=3, ignore_eos=True)
    messages = await client.verify(Round.of(created.handle, 1, free_run_steps=10))
    assert messages[-1].result.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    failed = grpc.StatusCode.FAILED_PRECONDITION
    assert await client.refusal(Round.of(created.handle, 2)) == (failed, "FINISHED")
    (again,) = await client.verify(Round.of(created.handle, 1))
    assert len(again.result.tokens) == 2


async def test_a_bad_round_leaves_the_cache_as_it_was(client: Client) -> None:
    plain = await client.generate(PROMPT, drafters.nothing, max_new_tokens=6, ignore_eos=True)
    created = await client.create(PROMPT, max_new_tokens=6, ignore_eos=True)
    stream = client.stub.Verify()
    await stream.write(Round.of(created.handle, 1))
    first = await stream.read()
    await stream.write(Round.of(created.handle, 2, TokenTree.chain([VOCAB])))
    assert reason_of(await failure(stream)) == "TOKEN_OUT_OF_VOCABULARY"
    tokens = await client.free_run(created.handle, 2)
    assert [*created.first.tokens, *first.result.tokens, *tokens] == plain


async def test_a_newer_stream_takes_over(client: Client, handle: bytes) -> None:
    old = client.stub.Verify()
    await old.write(Round.of(handle, 1))
    first = await old.read()
    new = client.stub.Verify()
    await new.write(Round.of(handle, 1))
    assert await new.read() == first
    error = await failure(old)
    assert error.code() == grpc.StatusCode.ABORTED
    assert reason_of(error) == "STREAM_SUPERSEDED"
    await new.write(Round.of(handle, 2))
    assert (await new.read()).round_id == 2


async def test_taking_over_in_the_middle_of_a_free_run(client: Client) -> None:
    plain = await client.generate(PROMPT, drafters.free_run, **FIELDS)
    created = await client.create(PROMPT, **FIELDS)
    old = client.stub.Verify()
    with held_up(client, after=5):
        await old.write(Round.of(created.handle, 1, free_run_steps=299))
        seen = list((await old.read()).result.tokens)
        repeated = Round.of(created.handle, 1, free_run_steps=299)
        taking_over = asyncio.create_task(client.verify(repeated))
        assert reason_of(await failure(old)) == "STREAM_SUPERSEDED"
    (stored,) = await taking_over
    tokens = list(stored.result.tokens)
    assert len(seen) <= len(tokens) < 299, "the run continued without its stream"
    assert tokens[: len(seen)] == seen
    tokens += await client.free_run(created.handle, 2)
    assert [*created.first.tokens, *tokens] == plain


async def test_a_broken_stream_ends_its_free_run(client: Client, handle: bytes) -> None:
    stream = client.stub.Verify()
    (cache,) = list(client.service.store)
    with held_up(client, after=5):
        await stream.write(Round.of(handle, 1, free_run_steps=299))
        seen = list((await stream.read()).result.tokens)
        stream.cancel()
        await until(lambda: cache.stream is None)
    await until(lambda: not cache.busy)
    (stored,) = await client.verify(Round.of(handle, 1))
    assert list(stored.result.tokens)[: len(seen)] == seen
    assert len(stored.result.tokens) < 299
    assert stored.result.committed_length == len(PROMPT) + len(stored.result.tokens)
    assert (await client.verify(Round.of(handle, 2)))[0].round_id == 2


async def test_the_handle_is_needed_once(client: Client, handle: bytes) -> None:
    stream = client.stub.Verify()
    await stream.write(Round.of(handle, 1))
    await stream.read()
    await stream.write(Round.of(b"", 2))
    assert (await stream.read()).round_id == 2
    await stream.write(Round.of(bytes(16), 3))
    assert reason_of(await failure(stream)) == "HANDLE_CHANGED"


async def test_an_empty_stream_is_no_error(client: Client) -> None:
    stream = client.stub.Verify()
    await stream.done_writing()
    assert [message async for message in stream] == []


async def test_a_free_run_ends_at_its_deadline(client: Client, handle: bytes) -> None:
    (answered,) = await client.verify(Round.of(handle, 1, TokenTree.chain([1]), deadline_ms=1))
    assert answered.last, "a late round is answered all the same"
    (cache,) = list(client.service.store)
    messages = await client.verify(Round.of(handle, 2, free_run_steps=298, deadline_ms=1))
    assert messages[-1].last
    assert 1 <= sum(len(message.result.tokens) for message in messages) < 298
    assert not cache.busy


async def test_release_in_the_middle_of_a_round(client: Client, handle: bytes) -> None:
    stream = client.stub.Verify()
    await stream.write(Round.of(handle, 1, free_run_steps=299))
    await stream.read()
    assert await client.release(handle)
    assert not await client.release(handle), "releasing twice is safe"
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        await stream.write(Round.of(handle, 2))  # the stream may have ended already
    assert (await failure(stream)).code() == grpc.StatusCode.NOT_FOUND
    code, reason = await client.refusal(Round.of(handle, 2))
    assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "CACHE_NOT_FOUND")
    await client.service.check_integrity()


async def test_renewal(client: Client, handle: bytes) -> None:
    renewed = await client.stub.RenewLease(verifier_pb2.RenewLeaseRequest(handle=handle))
    assert renewed.lease_ms == 30_000
    assert renewed.generation > 0
