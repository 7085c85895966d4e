"""KV and hidden states that drafters read, beside the verifier's own tensors, and the shared memory
that they are in."""

import asyncio
import gc
import math
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import until
from kv_support import caught_up, following, following_states, mapping, rounds
from open_files import MEMORY, open_files
from verifier_support import LAYOUT, PROMPT, Client, Serve

from paceline.convert import load_decoder
from paceline.decoder import LocalCache
from paceline.drafter.kv import KvGone, KvNotShared
from paceline.kernels import QueryBlock, plan_trees
from paceline.kernels.caches import from_rows
from paceline.kv.segment import HEADER_BYTES
from paceline.service.exchange import request_files
from paceline.v1 import kv_pb2
from paceline.verifier.kv.base import open_segments
from paceline.verifier.kv.segment import Segment
from paceline.verifier.rpc import kv_exchange

FIELDS: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}


def outputs(
    folder: Path, tokens: list[int], layers: tuple[int, ...], kv: str = "auto"
) -> torch.Tensor:
    """Outputs of layers for a text, one token at a time, side by side."""
    decoder = load_decoder(folder, kv_cache_dtype=kv, numerics="auto")  # as it is served
    cache = LocalCache(decoder.config)
    cache.reserve(len(tokens))
    rows = []
    for position, token in enumerate(tokens):
        plan = plan_trees([QueryBlock(0, position, None, 1)])
        found = decoder.forward(torch.tensor([token]), plan, [cache], logit_rows=None, taps=layers)
        rows.append(torch.cat(found.taps, dim=1))
        cache.commit([0])
    return torch.cat(rows)


async def test_only_requested_layers_are_kept(client: Client) -> None:
    plain = await client.create(PROMPT)
    tapped = await client.create(PROMPT, drafter=await client.reader(1))
    narrow = await client.create(PROMPT, drafter=await client.reader(1, window=16))
    caches = [cache.sequence.kv for cache in client.service.store]
    sizes = [kv.file_bytes for kv in caches]
    hidden = 48 * 4  # bytes of a row
    assert sizes[1] - sizes[0] == caches[0].capacity * hidden
    assert sizes[2] - sizes[0] == (256 + 512) * hidden
    for created, layers in ((plain, (0,)), (tapped, (0,)), (narrow, (0, 1))):
        with pytest.raises(KvNotShared, match="but the cache keeps those of"):
            await mapping(client, created, *layers, window=0)


@pytest.mark.parametrize(
    ("window", "parent", "reused"),
    [
        (0, ((0, 1), 0), 290),  # it has them all
        (0, ((1,), 0), 0),  # not this layer
        (0, None, 0),
        (40, None, 250),  # the last 40 are computed again
        (40, ((1,), 40), 250),
        (40, ((0,), 40), 290),
    ],
)
async def test_a_fork_has_hidden_states(
    client: Client, model: Path, window: int, parent: tuple[tuple[int, ...], int] | None,
    reused: int,
) -> None:  # fmt: skip
    """Copied from the parent if it has them, else computed."""
    prompt = [random.Random(4).randrange(1, 61) for _ in range(300)]
    name = "none" if parent is None else await client.reader(*parent[0], window=parent[1])
    older = await client.create(prompt, drafter=name)
    text = [*prompt[:290], 7, 8, 9]
    fork = await client.create(
        text, parent_handle=older.handle, drafter=await client.reader(0, window=window)
    )
    assert fork.reused_tokens == reused
    states = await mapping(client, fork, 0, window=window)
    first, rows = states.read(0, len(text))
    assert first == (len(text) - window if window else 0)
    assert torch.equal(rows, outputs(model, text, (0,))[first:])
    states.close()


async def test_a_fork_claims_no_states_that_its_parent_lacks(client: Client) -> None:
    """What is computed again is not copied: a parent of the newest positions has no rows before
    them, and one whose rows wrap around has others in their place."""
    prompt = [random.Random(5).randrange(1, 61) for _ in range(1200)]
    reader = await client.reader(0, window=40)
    older = await client.create(prompt[:1100], drafter=reader)
    newer = await client.create(prompt, parent_handle=older.handle, drafter=reader)
    for parent, shared in ((older, 300), (newer, 1075)):
        text = [*prompt[:shared], 7, 8, 9]
        fork = await client.create(text, parent_handle=parent.handle, drafter=reader)
        assert fork.reused_tokens == shared - 40
        taps = list(client.service.store)[-1].sequence.kv.taps
        assert taps is not None
        assert taps.first == shared - 40


async def test_overwritten_rows_are_dropped(client: Client) -> None:
    created = await client.create(PROMPT, drafter=await client.reader(0, window=16))
    states = await mapping(client, created, 0, window=16)
    (cache,) = client.service.store
    segment = cache.sequence.kv
    assert segment.taps is not None
    assert states.read(0, 5)[0] == 0
    segment.header.commit(700)  # as if the text had grown meanwhile
    first, rows = states.read(0, 5)
    assert (first, len(rows)) == (5, 0)
    first, rows = states.read(0, 700)
    assert (first, len(rows)) == (684, 16)
    segment.header.commit(len(PROMPT))
    states.close()


@pytest.mark.parametrize(
    ("name", "window", "message_bytes"),
    [
        ("Llama", 0, 1 << 20),
        ("Llama", 20, 5000),
        ("Qwen3", 20, 1 << 20),
        ("int8 KV", 20, 5000),
        ("bf16", 0, 5000),
    ],
)
async def test_readers_have_what_the_verifier_committed(
    serve: Serve, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, window: int,
    message_bytes: int,
) -> None:  # fmt: skip
    """KV and hidden states, mapped and followed, bit for bit after every round: with rejected
    nodes, moved paths, plain steps, changes of the budget, and past one reservation. The tokens are
    those without readers."""
    monkeypatch.setattr(kv_exchange, "MESSAGE_BYTES", message_bytes)
    kv = "int8" if name == "int8 KV" else "auto"
    async with serve(name, kv_cache_dtype=kv) as client:
        prompt = [random.Random(1).randrange(1, 61) for _ in range(230)]
        truth = await client.generate(prompt, None, **FIELDS)
        drafter = await client.reader(1, 0, window=window)
        created = await client.create(prompt, drafter=drafter, **FIELDS)
        (cache,) = client.service.store
        mapped = await mapping(client, created, 0, -1)
        states = await mapping(client, created, 1, 0, window=window)
        exchange, followed = await following(client, created)
        states_exchange, sent = await following_states(client, created, 1, 0, window=window)
        expected = outputs(models[name], [*prompt, *truth], (1, 0), kv)
        budgets, read = [64, 64, 300, 300, 5, 5, 100, 0, 0, 7] * 7, 0
        async for tokens in rounds(client, created, prompt, len(truth)):
            committed = cache.sequence.committed
            assert committed == len(prompt) + len(tokens) - 1
            assert mapped.committed == states.committed == committed
            budget = budgets.pop(0)
            await caught_up(followed, committed, budget, min(budget or committed, committed))
            await sent.wait_for(committed, 60)
            for index, layer in ((0, 0), (-1, 1)):
                ((keys, values),) = followed.parts(index)
                where = followed.cache.positions(layer)
                theirs = cache.sequence.kv.layer(layer)
                for own, sparse, plane in zip(
                    mapped.layer(index), (keys, values), theirs, strict=True
                ):
                    assert own[:, :committed].equal(plane[:, :committed])
                    # What is sent has the type of hidden states.
                    assert sparse.equal(from_rows(plane[:, where]).to(sparse.dtype))
            first = committed - window if window else 0
            found, rows = states.read(0, committed)
            assert found == first
            assert torch.equal(rows, expected[first:committed])
            read = max(read, first)
            found, rows = sent.read(read, committed)
            assert found == read
            assert torch.equal(rows, expected[read:committed])
            read = committed - 2  # what was read can be read once more
            for reader in (mapped, states, followed, sent):
                reader.check()
        assert tokens == truth
        assert len(sent._rows) <= (window or 40), "rows that were read are dropped"
        await client.release(created.handle)
        for reader in (mapped, states):
            with pytest.raises(KvGone):
                reader.check()
        for reader in (mapped, states, followed, sent):
            reader.close()
        await exchange.close()
        await states_exchange.close()
        await until(lambda: not cache.sequence.listeners)


async def test_a_mapping_does_not_delay_a_release(serve: Serve) -> None:
    """Room for one cache: it is released, accounted and admitted anew under ten mappings."""
    need = 3 << 17
    async with serve(kv_bytes=need, prefix_caching=False) as client:
        mapped = []
        for _ in range(10):
            created = await client.create(PROMPT, max_new_tokens=300)
            assert client.service.store.claimed_bytes > need / 2, "a second one finds no room"
            mapped.append(await mapping(client, created, 0))
            mapped[-1].check()
            assert await client.release(created.handle)
            assert (client.service.store.memory.used_bytes, open_segments()) == (0, set())
            await client.service.check_integrity()
        for kv in mapped:
            with pytest.raises(KvGone):
                kv.check()
            assert kv.layer(0)[0][:, : kv.committed].isfinite().all()
            kv.close()


async def map_cache(client: Client, read_grant: bytes) -> bytes | None:
    """The content of the segment that a read grant gives; None: it gives none."""
    files = await asyncio.to_thread(request_files, client.socket_path, read_grant, 60.0)
    if not files:
        return None
    (file,) = files
    with os.fdopen(file, "rb") as opened:
        return os.pread(opened.fileno(), os.fstat(file).st_size, 0)


async def test_the_header_leads_to_every_element(client: Client) -> None:
    """It has the layout, the committed length and the generation."""
    created = await client.create(PROMPT)
    (cache,) = client.service.store
    file = await map_cache(client, created.read_grant)
    assert file is not None
    assert file[:8] == struct.pack("=Q", int.from_bytes(b"PACEKV\0\3", "big"))
    assert struct.unpack_from("=2Q", file, 8) == (created.epoch, len(PROMPT))
    (size,) = struct.unpack_from("=Q", file, 24)
    layout = kv_pb2.SegmentLayout.FromString(file[32 : 32 + size])
    assert layout.dtype == kv_pb2.KV_DTYPE_FLOAT32
    assert not layout.HasField("pages")
    shape = (layout.layers, 2, layout.heads, layout.capacity, layout.head_dim)
    numbers = torch.frombuffer(bytearray(file[4096:]), dtype=torch.float32)
    stored = numbers[: math.prod(shape)].view(shape)
    for layer in range(LAYOUT.layers):
        for kind, theirs in enumerate(cache.sequence.kv.layer(layer)):
            assert stored[layer, kind].shape == theirs.shape
            ours = stored[layer, kind, :, : len(PROMPT)]
            assert torch.equal(ours, theirs[:, : len(PROMPT)])


async def test_refusals(client: Client) -> None:
    """And no descriptor stays open."""
    gc.collect()  # it takes long, and leases are short: earlier tests' files close now
    created, other = await client.create(PROMPT), await client.create(PROMPT)
    file = await map_cache(client, other.read_grant)
    assert file is not None
    assert struct.unpack_from("=Q", file, 8) == (other.epoch,)
    await client.release(other.handle)
    before = open_files(MEMORY)
    for grant in (created.handle, other.read_grant, bytes(16)):
        assert await map_cache(client, grant) is None
    for _ in range(8):
        assert await map_cache(client, created.read_grant) is not None
    await until(lambda: open_files(MEMORY) == before)


def test_memory_comes_when_reserved(segment: Segment) -> None:
    def pages() -> int:
        return os.fstat(segment.file).st_blocks * 512

    size = HEADER_BYTES + 1024 * LAYOUT.token_bytes
    assert os.fstat(segment.file).st_size == segment.file_bytes == size
    assert pages() == HEADER_BYTES
    segment.reserve(1)
    assert segment.reserved == 256
    assert pages() == HEADER_BYTES + 256 * LAYOUT.token_bytes
    segment.kv[..., :256, :] = 1.0
    assert pages() == HEADER_BYTES + 256 * LAYOUT.token_bytes, (
        "writing took no memory beyond the reservation"
    )
    segment.reserve(300)
    assert segment.reserved == 512
    segment.reserve(10_000)
    assert segment.reserved == segment.capacity == 1024
