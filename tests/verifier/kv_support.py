"""Readers of a verifier's caches, and rounds that change what they read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import drafters
import pytest
from verifier_support import Client, Round, until

from paceline.drafter.kv import exchange as exchange_module
from paceline.drafter.kv.access import VerifierAccess
from paceline.drafter.kv.exchange import KvExchange
from paceline.drafter.kv.options import KvOptions
from paceline.drafter.kv.remote import RemoteKv, RemoteStates
from paceline.tree import TokenTree


async def following(
    client: Client, created: Any, layers: tuple[int, ...] = (0, -1), budget: int = 64, **how: str
) -> tuple[KvExchange, RemoteKv]:
    exchange = KvExchange(VerifierAccess())
    options = KvOptions(kv="follow", **how)
    kv = await exchange.open(client.address, created.read_grant, layers, options, budget)
    assert isinstance(kv, RemoteKv)
    return exchange, kv


async def following_states(
    client: Client, created: Any, *layers: int, window: int = 0
) -> tuple[KvExchange, RemoteStates]:
    exchange = KvExchange(VerifierAccess())
    states = await exchange.open_states(
        client.address, created.read_grant, layers, window, "follow"
    )
    assert isinstance(states, RemoteStates)
    return exchange, states


async def mapping(client: Client, created: Any, *layers: int) -> Any:
    """A mapping of keys and values."""
    exchange = KvExchange(VerifierAccess())
    try:
        return await exchange.map_cache(client.address, created.read_grant, layers)
    finally:
        await exchange.close()


async def mapping_states(client: Client, created: Any, *layers: int, window: int = 0) -> Any:
    exchange = KvExchange(VerifierAccess())
    try:
        return await exchange.open_states(client.address, created.read_grant, layers, window, "map")
    finally:
        await exchange.close()


async def lost(exchange: KvExchange, address: str, stream: Any) -> None:
    """Break the connection, and wait until the stream is another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "CALL_SECONDS", 0.0)  # of grace
        exchange._drop(address)
    await until(lambda: stream._stream > 1)


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
    """Yields the output so far before each round: trees, of which most is rejected, and free
    runs."""
    draw = drafters.mixed(drafters.random_tree, drafters.free_run)
    tokens, rng, number = list(created.first.tokens), random.Random(2), 0
    stream = client.stub.Verify()
    while len(tokens) < count:
        yield tokens
        number += 1
        draft = draw([*prompt, *tokens], rng)
        free_run = {"free_run_steps": draft} if isinstance(draft, int) else {}
        tree = TokenTree() if free_run else draft
        await stream.write(Round.of(created.handle, number, tree, **free_run))
        answer = await stream.read()
        tokens += answer.result.tokens
        while not answer.last:
            answer = await stream.read()
            tokens += answer.result.tokens
    yield tokens
    await stream.done_writing()
    await asyncio.sleep(0)
