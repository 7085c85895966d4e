"""Readers of a verifier's caches, and rounds that change what they read."""

import random
from collections.abc import AsyncIterator
from typing import Any

import drafters
import torch
from calls import until
from verifier_support import Client, tokens_of

from paceline.drafter.kv import KvOptions
from paceline.drafter.kv.exchange import KvExchange, VerifierAccess
from paceline.drafter.kv.remote import RemoteKv, RemoteStates
from paceline.v1 import kv_pb2, kv_pb2_grpc


def joined_exchange(client: Client) -> KvExchange:
    """The exchange of a service that has joined over the socket."""
    exchange = KvExchange(VerifierAccess())
    exchange.sockets[client.address] = client.socket_path
    return exchange


async def following(
    client: Client, created: Any, layers: tuple[int, ...] = (0, -1), budget: int = 64, **how: str
) -> tuple[KvExchange, RemoteKv]:
    exchange = joined_exchange(client)
    options = KvOptions(kv="follow", **how)
    kv = await exchange.open(client.address, created.read_grant, layers, options, budget)
    assert isinstance(kv, RemoteKv)
    return exchange, kv


async def following_states(
    client: Client, created: Any, *layers: int, window: int = 0
) -> tuple[KvExchange, RemoteStates]:
    exchange = joined_exchange(client)
    states = await exchange.open_states(
        client.address, created.read_grant, layers, window, "follow"
    )
    assert isinstance(states, RemoteStates)
    return exchange, states


async def mapping(client: Client, created: Any, *layers: int, window: int | None = None) -> Any:
    """Keys and values; with a window hidden states."""
    exchange, cache = joined_exchange(client), (client.address, created.read_grant, layers)
    try:
        if window is None:
            return await exchange.map_cache(*cache)
        return await exchange.open_states(*cache, window, "map")
    finally:
        await exchange.close()


async def check_followed(client: Client, created: Any, budget: int, policy: str) -> None:
    """Check that a follower of layer 1 gets what its cache holds."""
    stub: Any = kv_pb2_grpc.KvExchangeServiceStub(client.channel)
    stream = stub.FollowCache()
    subscribe = kv_pb2.FollowSubscribe(
        read_grant=created.read_grant, layers=[1], budget=budget, policy=policy
    )
    await stream.write(kv_pb2.FollowCacheRequest(subscribe=subscribe))
    await stream.read()
    (chunk,) = (await stream.read()).chunks
    (cache,) = client.service.store
    keys, values = cache.sequence.kv.gather(1, torch.tensor(chunk.positions))
    assert chunk.keys == keys.contiguous().numpy().tobytes()
    assert chunk.values == values.contiguous().numpy().tobytes()


async def caught_up(kv: RemoteKv, committed: int, budget: int = 64, positions: int = 0) -> None:
    """Until the update of a committed length is applied, and there are so many positions."""

    def applied() -> bool:
        kv.refresh(committed, budget)
        parts = kv.parts(kv.layers[0])
        return bool(parts) and kv.committed == committed and positions in (0, parts[0][0].shape[1])

    await until(applied)


async def rounds(
    client: Client, created: Any, prompt: list[int], count: int
) -> AsyncIterator[list[int]]:
    """Yields the output so far before each step: with trees, of which most is rejected, and
    without, one step or several."""
    draw, rng = drafters.mixed(drafters.random_tree, drafters.nothing), random.Random(2)
    tokens, name = list(created.first.tokens), await client.drafter_service.add(draw, seed=2)
    while len(tokens) < count:
        yield tokens
        steps = rng.choice((1, 1, 2, 7))
        tokens += tokens_of(
            await client.steps(created.handle, steps, position=len(tokens), drafter=name)
        )
    yield tokens
    client.drafter_service.remove(name)
