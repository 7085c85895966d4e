"""What drafters read beside the verifier's own tensors, through whole generations."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import until
from kv_support import caught_up, following, following_states, mapping, mapping_states, rounds
from test_taps import outputs
from verifier_support import serving

from paceline.drafter.kv import KvGone
from paceline.kernels.caches import from_rows
from paceline.verifier.kv.base import open_segments
from paceline.verifier.rpc import kv_exchange

PROMPT = [3, 1, 4, 1, 5]
FIELDS: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}


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
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str,
    window: int, message_bytes: int,
) -> None:  # fmt: skip
    """KV and hidden states, mapped and followed, bit for bit after every round: with rejected
    nodes, moved paths, plain steps, changes of the budget, and past one reservation. The tokens are
    those without readers."""
    monkeypatch.setattr(kv_exchange, "MESSAGE_BYTES", message_bytes)
    kv = "int8" if name == "int8 KV" else "auto"
    async with serving(
        models[name], tmp_path / "v.sock", kv_bytes=1 << 28, kv_cache_dtype=kv
    ) as client:
        prompt = [random.Random(1).randrange(1, 61) for _ in range(230)]
        truth = await client.generate(prompt, None, **FIELDS)
        drafter = await client.reader(1, 0, window=window)
        created = await client.create(prompt, drafter=drafter, **FIELDS)
        (cache,) = client.service.store
        mapped = await mapping(client, created, 0, -1)
        states = await mapping_states(client, created, 1, 0, window=window)
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


async def test_a_mapping_does_not_delay_a_release(model: Path, tmp_path: Path) -> None:
    """Room for one cache: it is released, accounted and admitted anew under ten mappings."""
    need = 3 << 17
    async with serving(model, tmp_path / "v.sock", kv_bytes=need, prefix_caching=False) as client:
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
