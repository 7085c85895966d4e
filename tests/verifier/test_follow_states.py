"""Hidden states that are sent over gRPC: each row of the requested layers once."""

import asyncio
import random
from typing import Any

import pytest
import torch
from calls import until
from kv_support import following_states, mapping_states
from verifier_support import Client

from paceline.drafter.kv import KvGone
from paceline.drafter.kv.remote import RemoteStates
from paceline.kv.wire import encode_rows
from paceline.v1 import kv_pb2, verifier_pb2

HIDDEN = 48
ROW = HIDDEN * 4  # bytes
PROMPT = [random.Random(7).randrange(1, 61) for _ in range(300)]
FIELDS: dict[str, Any] = {"max_new_tokens": 90, "ignore_eos": True}


async def test_a_stream_ends_with_its_connection_or_cache(client: Client) -> None:
    created = await client.create(PROMPT, drafter=await client.reader(0, 1), **FIELDS)
    exchange, sent = await following_states(client, created, 0)
    await sent.wait_for(len(PROMPT), 60)
    received = sent.received
    assert ROW * len(PROMPT) < received < ROW * len(PROMPT) + 2000, "only the requested layer"
    await client.steps(created.handle, 1)
    await sent.wait_for(len(PROMPT) + 1, 60)
    assert sent.received < received + 3 * ROW, "rows are sent once"
    first, rows = sent.read(0, len(PROMPT) + 1)
    mapped = await mapping_states(client, created, 0)
    assert first == 0
    assert torch.equal(rows, mapped.read(0, len(PROMPT) + 1)[1])
    mapped.close()
    other_exchange, other = await following_states(client, created, 0)
    exchange.drop(client.address)
    await client.release(created.handle)
    for each in (sent, other):
        await until(lambda each=each: each._gone is not None)
        with pytest.raises(KvGone):
            each.check()
        each.close()
    await exchange.close()
    await other_exchange.close()


async def test_waiting_times_out_once(client: Client) -> None:
    created = await client.create(PROMPT, drafter=await client.reader(0), **FIELDS)
    exchange, sent = await following_states(client, created, 0)
    await sent.wait_for(len(PROMPT), 60)
    await sent.wait_for(len(PROMPT) + 1, 0.05)
    assert sent.committed == len(PROMPT)
    async with asyncio.timeout(60):
        await sent.wait_for(len(PROMPT) + 1, 1000)
    await client.steps(created.handle, 1)
    await until(lambda: sent.committed > len(PROMPT))
    await sent.wait_for(len(PROMPT) + 1, 0)
    sent.close()
    await exchange.close()


def message(**fields: Any) -> kv_pb2.FollowCacheResponse:
    rows = {"layer": 0, "start": 0, "count": 2, "data": encode_rows(torch.zeros(2, 3)), **fields}
    return kv_pb2.FollowCacheResponse(
        update_id=1,
        committed_length=2,
        last=True,
        hidden_states=[verifier_pb2.HiddenStates(**rows)],
    )


@pytest.mark.parametrize(
    "change", [{"layer": 1}, {"start": 1}, {"count": 3}, {"data": b"xx"}, {"count": 0, "data": b""}]
)
async def test_invalid_updates_are_refused(change: dict[str, Any]) -> None:
    never = asyncio.Event()

    class Silent:
        async def write(self, request: Any) -> None:
            await never.wait()

        def cancel(self) -> None: ...

    subscribe = kv_pb2.FollowSubscribe(hidden_state_layers=[0])
    sent = RemoteStates(Silent, subscribe)
    sent._shape.set_result(kv_pb2.KvShape(hidden_size=3, dtype=kv_pb2.KV_DTYPE_FLOAT32))
    await sent._receive([message()])
    assert sent.read(0, 2)[1].shape == (2, 3)
    with pytest.raises(KvGone):
        await sent._receive([message(**change)])
    sent.close()
