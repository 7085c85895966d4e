"""FollowCache: updates add up to the selected positions, within the budget; states come once."""

import asyncio
import random
from typing import Any

import grpc
import pytest
import torch
from calls import refusal, until
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_support import caught_up, following, following_states, mapping
from verifier_support import LAYOUT, MEMORY, Client

from paceline.drafter.kv import KvGone
from paceline.drafter.kv.remote import DeltaCache, RemoteStates
from paceline.kernels import streaming
from paceline.kernels.caches import from_rows, to_rows
from paceline.kv.selection import SelectionPolicy, Streaming
from paceline.kv.wire import KV_TYPES, decode, encode, encode_rows, position_bytes
from paceline.text import Text
from paceline.v1 import kv_pb2, kv_pb2_grpc, verifier_pb2
from paceline.verifier.engine.job import CachedSequence, Request
from paceline.verifier.kv.segment import Segment
from paceline.verifier.rpc import kv_exchange
from paceline.verifier.rpc.kv_exchange import FollowStream
from paceline.verifier.store import Cache

CODE = grpc.StatusCode
FLOAT32 = kv_pb2.KV_DTYPE_FLOAT32


class Scattered(SelectionPolicy):
    """Random positions, other ones in each layer and each time."""

    def __init__(self, layers: int, seed: int) -> None:
        self._layers = layers
        self._draws = torch.Generator().manual_seed(seed)

    def choose(self, committed: int, budget: int) -> list[torch.Tensor]:
        return [
            torch.randperm(committed, generator=self._draws)[:budget].sort().values
            for _ in range(self._layers)
        ]


def new_cache(segment: Segment) -> Cache:
    segment.reserve(1000)
    segment.kv[..., : segment.reserved, :].normal_()
    return Cache(CachedSequence(Request(Text((1,), limit=900)), segment, "local"), 1)


@settings(max_examples=12)
@given(
    steps=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 200)), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    layers=st.sampled_from([(0, 1), (1,)]),
    messages=st.sampled_from([1, 2000, 1 << 20]),
)
def test_updates_add_up_to_the_selection(
    steps: list[tuple[int, int]], seed: int, layers: tuple[int, ...], messages: int
) -> None:
    """Growing texts, changing budgets, any selection, messages of any size."""
    segment = Segment(MEMORY, 1024)
    cache, limit = new_cache(segment), kv_exchange.MESSAGE_BYTES
    try:
        kv_exchange.MESSAGE_BYTES = messages
        policy = Scattered(len(layers), seed) if seed % 2 else Streaming(segment, layers)
        stream = FollowStream(cache, layers, policy, 1)
        delta = DeltaCache(stream.shape)
        row = position_bytes(LAYOUT.kv_heads, LAYOUT.head_dim, FLOAT32)
        for grown, budget in steps:
            cache.sequence.committed += grown
            stream.budget = budget
            update = list(stream.update())
            assert [message.last for message in update] == [False] * (len(update) - 1) + [True]
            for message in update:
                positions = sum(len(chunk.positions) for chunk in message.chunks)
                assert positions * row <= max(messages, row)
            delta.apply(update, budget)
            assert len(delta) == min(budget, cache.sequence.committed)
            for index, layer in enumerate(layers):
                where = delta.positions(index)
                if not seed % 2:
                    parts = streaming(cache.sequence.committed, budget)
                    assert sorted(where.tolist()) == [p for part in parts for p in part]
                for mine, plane in zip(delta.layer(index), segment.layer(layer), strict=True):
                    assert mine.equal(plane[:, where])
    finally:
        kv_exchange.MESSAGE_BYTES = limit
        segment.close()


def test_only_what_changed_is_sent_again(segment: Segment) -> None:
    cache = new_cache(segment)
    stream = FollowStream(cache, (0, 1), Streaming(segment, (0, 1)), 100)
    cache.sequence.committed = 500
    (first,) = stream.update()
    assert [len(chunk.positions) for chunk in first.chunks] == [100, 100]
    assert not first.drops
    cache.sequence.committed = 503
    (second,) = stream.update()
    assert [list(chunk.positions) for chunk in second.chunks] == [[500, 501, 502]] * 2
    assert [list(drop.positions) for drop in second.drops] == [[404, 405, 406]] * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.drops.add(layer=0, positions=[900]), "not in the cache"),
        (lambda m: m.chunks[0].positions.__setitem__(0, 450), "comes twice"),
        (lambda m: m.chunks[0].positions.__setitem__(0, 503), "not below 503"),
        (lambda m: setattr(m.chunks[0], "keys", b""), "cannot be"),
        (lambda m: m.chunks[0].key_scales.append(1.0), "do not fit"),
        (lambda m: setattr(m.chunks[0], "layer", 2), "layer 2"),
        (lambda m: m.drops.pop(), "leaves"),
        (lambda m: m.chunks.pop(), "leaves"),
    ],
)
def test_invalid_updates_are_refused(segment: Segment, change: Any, reason: str) -> None:
    cache = new_cache(segment)
    stream = FollowStream(cache, (0, 1), Streaming(segment, (0, 1)), 103)
    delta = DeltaCache(stream.shape)
    for committed in (500, 503):
        cache.sequence.committed = committed
        (message,) = stream.update()
        if committed == 503:
            change(message)
            with pytest.raises(KvGone, match=reason):
                delta.apply([message], 103)
        else:
            delta.apply([message], 103)


@given(wire=st.sampled_from(sorted(KV_TYPES)), seed=st.integers(0, 99), size=st.floats(1e-6, 1e4))
def test_types_on_the_wire(wire: Any, seed: int, size: float) -> None:
    """A round trip gives what the rows of the cache hold."""
    plane = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed)) * size
    plane[0, 0] = 0.0
    rows = to_rows(plane, KV_TYPES[wire])
    data, scales = encode(rows)
    assert 2 * (len(data) + 4 * len(scales)) == 5 * position_bytes(2, 8, wire)
    found = decode(data, scales, (2, 5, 8), wire, torch.float32)
    assert found.equal(from_rows(rows).float())


async def test_two_updates_are_sent_without_an_acknowledgement(client: Client) -> None:
    created = await client.create([3, 1, 4], max_new_tokens=50, ignore_eos=True)
    exchange, kv = await following(client, created)
    for position in range(1, 9):
        await client.steps(created.handle, 1, position)
    await until(lambda: len(kv._pending) == 2)
    await client.service.engine.between_steps(lambda: None)
    assert len(kv._pending) == 2
    kv.refresh(3, 64)
    assert kv.parts(0)[0][0].shape[1] == 3, "an update ahead of the text waits"
    assert len(kv._pending) == 1
    await caught_up(kv, 11)
    kv.close()
    await exchange.close()


async def test_refusals(client: Client) -> None:
    created = await client.create([3, 1, 4])
    stub: Any = kv_pb2_grpc.KvExchangeServiceStub(client.channel)
    good = {"read_grant": created.read_grant, "budget": 8}
    for fields, code, reason in (
        ({"read_grant": b"x"}, CODE.INVALID_ARGUMENT, "BAD_GRANT"),
        ({"read_grant": created.handle}, CODE.NOT_FOUND, "CACHE_NOT_FOUND"),
        ({"layers": [2]}, CODE.INVALID_ARGUMENT, "LAYER_OUT_OF_RANGE"),
        ({"layers": [-3]}, CODE.INVALID_ARGUMENT, "LAYER_OUT_OF_RANGE"),
        ({"budget": 0}, CODE.INVALID_ARGUMENT, "NO_BUDGET"),
        ({"policy": "luck"}, CODE.INVALID_ARGUMENT, "BAD_POLICY"),
        ({"hidden_state_layers": [0]}, CODE.FAILED_PRECONDITION, "HIDDEN_STATES_NOT_KEPT"),
    ):
        call = stub.FollowCache()
        subscribe = kv_pb2.FollowSubscribe(**{**good, **fields})
        await call.write(kv_pb2.FollowCacheRequest(subscribe=subscribe))
        assert await refusal(call) == (code, reason)
    ack = kv_pb2.FollowCacheRequest(ack=kv_pb2.FollowAck(update_id=9))
    begin = kv_pb2.FollowCacheRequest(subscribe=kv_pb2.FollowSubscribe(**good))
    for reason, last in (("NOT_SUBSCRIBED", ack), ("BAD_ACK", ack), ("ALREADY_SUBSCRIBED", begin)):
        call = stub.FollowCache()
        if reason != "NOT_SUBSCRIBED":
            await call.write(begin)
            await call.read()
        await call.write(last)
        assert (await refusal(call))[1] == reason
    calls = [stub.FollowCache() for _ in range(17)]
    for call in calls:
        await call.write(begin)
        first = await call.read() if call is not calls[-1] else None
        assert first is None or first.shape.layers == 2
    assert (await refusal(calls[-1]))[1] == "TOO_MANY_FOLLOWERS"
    for call in calls:
        call.cancel()
    (cache,) = client.service.store
    await until(lambda: not cache.sequence.listeners)


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
    mapped = await mapping(client, created, 0, window=0)
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
    states = [verifier_pb2.HiddenStates(**rows)]
    return kv_pb2.FollowCacheResponse(
        update_id=1, committed_length=2, last=True, hidden_states=states
    )


@pytest.mark.parametrize(
    "change", [{"layer": 1}, {"start": 1}, {"count": 3}, {"data": b"xx"}, {"count": 0, "data": b""}]
)
async def test_invalid_states_are_refused(change: dict[str, Any]) -> None:
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
