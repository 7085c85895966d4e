"""A drafter's mapping beside the verifier's own tensors, through whole generations."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import drafters
import pytest
from verifier_support import Client, serving

from paceline.drafter.kv import KvExchange, KvGone, KvNotShared, VerifierAccess
from paceline.drafter.kv.shared import SharedKv
from paceline.v1 import tree_pb2, verifier_pb2
from paceline.verifier.kv.segment import own_segments

PROMPT = [3, 1, 4, 1, 5]


async def mapping(client: Client, created: Any, *layers: int) -> SharedKv:
    exchange = KvExchange(VerifierAccess())
    try:
        return await exchange.map_cache(client.address, created.read_grant, layers)
    finally:
        await exchange.close()


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "bf16"])
async def test_it_is_the_verifiers_kv_bit_for_bit(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """After every round, rejected nodes, moved paths and free runs included, past one reserve."""
    async with serving(models[name], tmp_path / "v.sock", kv_bytes=1 << 28) as client:
        prompt = [random.Random(1).randrange(1, 61) for _ in range(230)]
        draw = drafters.mixed(drafters.random_tree, drafters.free_run)
        fields = {"max_new_tokens": 60, "ignore_eos": True}
        truth = await client.generate(prompt, drafters.nothing, **fields)
        created = await client.create(prompt, **fields)
        kv = await mapping(client, created, 0, -1)
        (cache,) = client.service.store
        frozen = [plane[:, : len(prompt)].clone() for plane in (*kv.layer(0), *kv.layer(-1))]
        tokens, rng, stream, number = list(created.first.tokens), random.Random(2), None, 0
        stream = client.stub.Verify()
        while len(tokens) < len(truth):
            number += 1
            draft = draw([*prompt, *tokens], rng)
            request = verifier_pb2.VerifyRequest(handle=created.handle, round_id=number)
            if isinstance(draft, int):
                request.free_run_steps = draft
            else:
                request.tree.CopyFrom(tree_pb2.TokenTree(tokens=draft[0], parents=draft[1]))
            await stream.write(request)
            answer = await stream.read()
            tokens += answer.result.tokens
            while not answer.last:
                answer = await stream.read()
                tokens += answer.result.tokens
            kv.check()
            assert kv.committed == answer.result.committed_length == cache.sequence.committed
            for index, layer in ((0, 0), (-1, 1)):
                theirs = cache.sequence.segment.layer(layer)
                for mine, plane in zip(kv.layer(index), theirs, strict=True):
                    assert mine.dtype == plane.dtype
                    assert mine[:, : kv.committed].equal(plane[:, : kv.committed])
        assert tokens == truth
        planes = [*kv.layer(0), *kv.layer(-1)]
        assert all(a.equal(b[:, : len(prompt)]) for a, b in zip(frozen, planes, strict=True))
        await stream.done_writing()
        await client.release(created.handle)
        with pytest.raises(KvGone):
            kv.check()
        kv.close()


async def test_a_stalled_reader_keeps_nobody_from_anything(model: Path, tmp_path: Path) -> None:
    """Room for one cache: it is released, accounted and admitted anew under ten mappings."""
    need = 1 << 19
    async with serving(model, tmp_path / "v.sock", kv_bytes=need) as client:
        held: list[SharedKv] = []
        for _ in range(10):
            created = await client.create(PROMPT, max_new_tokens=300)
            assert client.service.store.used_bytes > need / 2, "a second one finds no room"
            held.append(await mapping(client, created, 0))
            held[-1].check()
            assert await client.release(created.handle)
            assert (client.service.store.used_bytes, own_segments()) == (0, set())
            await client.service.check_integrity()
        for kv in held:
            with pytest.raises(KvGone):
                kv.check()
            assert kv.layer(0)[0][:, : kv.committed].isfinite().all()
            kv.close()


async def test_caches_of_many_streams_are_not_mixed_up(client: Client) -> None:
    created = [await client.create([*PROMPT, index]) for index in range(6)]
    mapped = await asyncio.gather(*(mapping(client, each, -1) for each in created))
    for kv, each in zip(mapped, created, strict=True):
        cache = client.service.store.find_granted(each.read_grant)
        theirs = cache.sequence.segment.layer(1)[0]
        assert kv.layer(-1)[0][:, : kv.committed].equal(theirs[:, : kv.committed])
    await client.release(created[0].handle)
    gone = mapped.pop(0)
    with pytest.raises(KvGone):
        gone.check()
    for kv in mapped:
        kv.check()
    for kv in [gone, *mapped]:
        kv.close()
    for each in created[1:]:
        await client.release(each.handle)


async def test_a_refusal_says_why(client: Client) -> None:
    created = await client.create(PROMPT)
    exchange = KvExchange(VerifierAccess())
    for address, grant, layers, says in (
        (client.address, bytes(16), (0,), "NOT_FOUND: no cache has this read grant"),
        (client.address, b"short", (0,), "INVALID_ARGUMENT: the read grant has 5 bytes"),
        (client.address, created.read_grant, (2,), "INVALID_ARGUMENT: layer 2 was requested"),
        (client.address, created.read_grant, (-3,), "reads layer -3"),
        (f"{client.address}x", created.read_grant, (0,), "UNAVAILABLE"),
        ("verifier.example:7431", created.read_grant, (0,), "is not on this machine"),
    ):
        with pytest.raises(KvNotShared, match=says):
            await exchange.map_cache(address, grant, layers)
    kv = await exchange.map_cache(client.address, created.read_grant, (0,))
    kv.check()
    kv.close()
    await exchange.close()
    await client.release(created.handle)
