"""Hidden states that are kept for drafters."""

import random
from pathlib import Path

import pytest
import torch
from kv_support import mapping_states
from verifier_support import Client

from paceline.convert import load_decoder
from paceline.decoder import LocalCache
from paceline.drafter.kv import KvNotShared
from paceline.kernels import QueryBlock, plan_trees

PROMPT = [3, 1, 4, 1, 5]
FIELDS = {"max_new_tokens": 60, "ignore_eos": True}


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
    sizes = [cache.sequence.kv.file_bytes for cache in client.service.store]
    hidden = 48 * 4  # bytes of a row
    assert sizes[1] - sizes[0] == cache_slots(client) * hidden
    assert sizes[2] - sizes[0] == (256 + 512) * hidden
    for created, layers in ((plain, (0,)), (tapped, (0,)), (narrow, (0, 1))):
        with pytest.raises(KvNotShared, match="but the cache keeps those of"):
            await mapping_states(client, created, *layers)


def cache_slots(client: Client) -> int:
    (first, *_) = client.service.store
    return first.sequence.kv.capacity


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
    client: Client,
    model: Path,
    window: int,
    parent: tuple[tuple[int, ...], int] | None,
    reused: int,
) -> None:
    """Copied from the parent if it has them, else computed."""
    prompt = [random.Random(4).randrange(1, 61) for _ in range(300)]
    name = "none" if parent is None else await client.reader(*parent[0], window=parent[1])
    older = await client.create(prompt, drafter=name)
    text = [*prompt[:290], 7, 8, 9]
    fork = await client.create(
        text, parent_handle=older.handle, drafter=await client.reader(0, window=window)
    )
    assert fork.reused_tokens == reused
    states = await mapping_states(client, fork, 0, window=window)
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
        await client.release(fork.handle)


async def test_overwritten_rows_are_dropped(client: Client) -> None:
    created = await client.create(PROMPT, drafter=await client.reader(0, window=16))
    states = await mapping_states(client, created, 0, window=16)
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
