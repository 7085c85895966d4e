"""Hidden states sent to a drafter elsewhere: the right rows, only those asked for, once."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import drafters
import pytest
import torch
from test_follow_cache import lost
from test_taps import mapping
from verifier_support import Client, Round, until

from paceline.drafter.kv import KvExchange, KvGone, KvNotShared, VerifierAccess
from paceline.drafter.kv import stream as stream_module
from paceline.drafter.kv.remote import RemoteStates
from paceline.drafter.kv.stream import Update
from paceline.kv.wire import decode_rows, encode_rows
from paceline.v1 import kv_pb2, verifier_pb2
from paceline.verifier import follow

HIDDEN = 48
ROW = HIDDEN * 4  # bytes
PROMPT = [random.Random(7).randrange(1, 61) for _ in range(300)]
FIELDS: dict[str, Any] = {"max_new_tokens": 90, "ignore_eos": True}


async def following(
    client: Client, created: Any, *layers: int, window: int = 0
) -> tuple[KvExchange, RemoteStates]:
    exchange = KvExchange(VerifierAccess())
    states = await exchange.open_states(
        client.address, created.read_grant, layers, window, "follow"
    )
    assert isinstance(states, RemoteStates)
    return exchange, states


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("message_bytes", [1 << 20, 5000])
async def test_they_are_the_mapped_ones_bit_for_bit(
    client: Client, window: int, message_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After rounds with rejected nodes; in one order of layers or the other, piece by piece."""
    monkeypatch.setattr(follow, "MESSAGE_BYTES", message_bytes)
    created = await client.create(
        PROMPT, hidden_state_layers=[0, 1], hidden_state_window=window, **FIELDS
    )
    mapped = await mapping(client, created, 1, 0, window=window)
    exchange, sent = await following(client, created, 1, 0, window=window)
    stream, rng = client.stub.Verify(), random.Random(2)
    tokens, read = list(created.first.tokens), 0
    for number in range(1, 12):
        committed = mapped.committed
        await sent.wait_for(committed, 60)
        assert sent.committed == committed
        read = max(read, committed - window) if window else read
        first, rows = sent.read(read, committed)
        expected_first, expected = mapped.read(read, committed)
        assert first == expected_first == read
        assert torch.equal(rows, expected)
        read = committed - 2  # what was read may be asked for once more
        tree = drafters.random_tree([*PROMPT, *tokens], rng)
        await stream.write(Round.of(created.handle, number, tree))
        tokens += (await stream.read()).result.tokens
    positions = mapped.committed - (len(PROMPT) - window if window else 0)
    assert sent.received < 2 * ROW * positions + 4000, "each row came once"
    held = sent._rows
    assert held is not None
    assert len(held) <= (window or 20), "what was read is forgotten"
    for each in (sent, mapped):
        each.close()
    await exchange.close()
    (cache,) = client.service.store
    await until(lambda: not cache.sequence.listeners)
    await client.release(created.handle)


async def test_only_the_layers_asked_for_are_sent(client: Client) -> None:
    created = await client.create(PROMPT, hidden_state_layers=[0, 1], **FIELDS)
    exchange, sent = await following(client, created, 1)
    await sent.wait_for(len(PROMPT), 60)
    assert ROW * len(PROMPT) < sent.received < ROW * len(PROMPT) + 2000
    assert sent.read(0, len(PROMPT))[1].shape == (len(PROMPT), HIDDEN)
    sent.close()
    plain = await client.create(PROMPT, **FIELDS)
    with pytest.raises(KvNotShared, match="create it with hidden_state_layers"):
        await exchange.open_states(client.address, plain.read_grant, (0,), 0)
    await exchange.close()


async def test_a_lost_stream_goes_on_where_it_was(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "FIRST_DELAY", 0.01)
    created = await client.create(PROMPT, hidden_state_layers=[0], **FIELDS)
    exchange, sent = await following(client, created, 0)
    await sent.wait_for(len(PROMPT), 60)
    received = sent.received
    await lost(exchange, client.address, sent)
    stream = client.stub.Verify()
    await stream.write(Round.of(created.handle, 1))
    await stream.read()
    await sent.wait_for(len(PROMPT) + 1, 60)
    assert sent.received < received + 3 * ROW, "what is held is not sent again"
    first, rows = sent.read(0, len(PROMPT) + 1)
    mapped = await mapping(client, created, 0)
    assert first == 0
    assert torch.equal(rows, mapped.read(0, len(PROMPT) + 1)[1])
    mapped.close()
    await client.release(created.handle)
    await until(lambda: sent._gone is not None)
    with pytest.raises(KvGone):
        sent.check()
    sent.close()
    await exchange.close()


async def test_waiting_for_what_does_not_come_has_an_end(client: Client) -> None:
    created = await client.create(PROMPT, hidden_state_layers=[0], **FIELDS)
    exchange, sent = await following(client, created, 0)
    await sent.wait_for(len(PROMPT), 60)
    await sent.wait_for(len(PROMPT) + 1, 0.05)
    assert sent.committed == len(PROMPT)
    async with asyncio.timeout(60):
        await sent.wait_for(len(PROMPT) + 1, 1000)  # not again in vain
    stream = client.stub.Verify()
    await stream.write(Round.of(created.handle, 1))
    await stream.read()
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
    "lie", [{"layer": 1}, {"start": 1}, {"count": 3}, {"data": b"xx"}, {"count": 0, "data": b""}]
)
async def test_lies_are_found_out(lie: dict[str, Any]) -> None:
    never = asyncio.Event()

    class Silent:
        async def write(self, request: Any) -> None:
            await never.wait()

        def cancel(self) -> None: ...

    subscribe = kv_pb2.FollowSubscribe(hidden_state_layers=[0])
    sent = RemoteStates(Silent, subscribe)
    shape = kv_pb2.KvShape(hidden_size=3, dtype=kv_pb2.KV_DTYPE_FLOAT32)
    await sent._receive(Update(1, shape, [message()]))
    assert sent.read(0, 2)[1].shape == (2, 3)
    with pytest.raises(KvGone):
        await sent._receive(Update(1, shape, [message(**lie)]))
    sent.close()
    sent._first.cancel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_on_the_wire(dtype: torch.dtype) -> None:
    kinds = {
        torch.float32: kv_pb2.KV_DTYPE_FLOAT32,
        torch.bfloat16: kv_pb2.KV_DTYPE_BFLOAT16,
        torch.float16: kv_pb2.KV_DTYPE_FLOAT16,
    }
    rows = torch.randn(5, 7).to(dtype)
    assert torch.equal(decode_rows(encode_rows(rows), 5, 7, kinds[dtype]), rows)
    with pytest.raises(ValueError, match="cannot have"):
        decode_rows(b"", 0, 7, kv_pb2.KV_DTYPE_INT8)
