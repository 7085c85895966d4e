"""KV of ended texts is taken over by prompts of the same client, and by nobody else."""

import asyncio
from typing import Any

import drafters
import grpc
import pytest
from calls import reason_of, refusal, until
from hypothesis import given
from hypothesis import strategies as st
from verifier_support import MEMORY, Client, Serve, text

from paceline.prefixes import CHUNK_TOKENS
from paceline.text import Text
from paceline.verifier.engine.job import CachedSequence, Request
from paceline.verifier.engine.queue import PrefixCache
from paceline.verifier.kv.segment import Segment

SERVED = {"kv_bytes": 1 << 26, "prefix_caching": True}
FIELDS: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}


@pytest.mark.parametrize("options", [{}, {"paged_kv": True}], ids=["segments", "pages"])
async def test_turns_of_a_conversation(serve: Serve, options: dict[str, Any]) -> None:
    """A turn reuses the one before, with the tokens of a prefill of everything."""
    turns, prompt = [], text(9, 300)
    async with serve(kv_bytes=1 << 24, **options) as fresh:
        for turn in range(3):
            output = await fresh.generate(prompt, None, **FIELDS)
            turns.append((prompt, output))
            prompt = [*prompt, *output, *text(turn, 20)]
    options |= {"kv_bytes": 1 << 24, "prefix_caching": True}
    async with serve(**options) as client:
        done = 0
        for prompt, output in turns:
            got, _, created = await client.run(prompt, **FIELDS)
            assert (created.reused_tokens, got) == (done, output)
            done = len(prompt) + len(output) - 1
        await client.service.check_integrity()
        assert len(client.service.engine.prefixes) == 1, "a turn replaces the one it continues"
        draws = drafters.all_of(turns[-1][1], len(turns[-1][0]))
        for name, draw in draws.items():
            assert await client.generate(turns[-1][0], draw, **FIELDS) == turns[-1][1], name


async def test_hidden_states_outlast_a_turn_without_them(client: Client) -> None:
    """A turn that its drafter reads none of continues a text, and does not replace its states."""
    prompt = text(5, 200)
    reader = await client.reader(0)
    for drafter, reused in ((reader, 0), ("none", 229), (reader, 229), ("none", 289)):
        created = await client.create(prompt, drafter=drafter, **FIELDS)
        assert created.reused_tokens == reused
        prompt = [*prompt, *created.first.tokens, *await client.rest(created.handle)]
        await client.release(created.handle)
    assert len(client.service.engine.prefixes) == 2


async def test_a_running_text_is_shared(client: Client) -> None:
    prompt = text(3, 200)
    first = await client.create(prompt, **FIELDS)
    second = await client.create([*prompt[:150], 1], **FIELDS)
    assert second.reused_tokens == 150
    assert [r.reused_tokens for r in [await client.create(text(4, 200), **FIELDS)]] == [0]
    assert first.read_grant != second.read_grant


async def test_texts_are_shared_with_the_same_user_only(client: Client) -> None:
    prompt = text(6, 200)
    users = ["", "anna", "bob", "a" * 256]
    for user in users:
        created = await client.create(prompt, user=user, **FIELDS)
        assert created.reused_tokens == 0
        await client.release(created.handle)
    for user in users:
        assert (await client.create(prompt, user=user, **FIELDS)).reused_tokens == 199
    (cache, *_) = client.service.store
    assert len({each.sequence.text.owner for each in client.service.store}) == 4
    assert {each.owner for each in client.service.store} == {cache.owner}
    assert (await refusal(client.create(prompt, user="a" * 257, **FIELDS)))[1] == "BAD_USER"


async def test_memory_of_ended_texts_is_freed_when_needed(serve: Serve) -> None:
    """There is memory for two texts. Each of six different ones gets it, and the newest is kept."""
    options: dict[str, Any] = {"kv_bytes": 1 << 19, "prefix_caching": True}
    async with serve(**options) as client:
        memory = client.service.store.memory
        block = 256 * memory.layout.token_bytes
        texts = [text(seed, 300) for seed in range(memory.limit_bytes // block)]
        for prompt in texts:
            await client.generate(prompt, None, **FIELDS)
        assert block <= memory.used_bytes <= memory.limit_bytes
        assert (await client.create(texts[-1], **FIELDS)).reused_tokens == 299
        assert (await client.create(texts[0], **FIELDS)).reused_tokens == 0
        await client.service.check_integrity()


async def test_readers_of_an_ended_text_stop(client: Client) -> None:
    created = await client.create(text(1, 200), **FIELDS)
    (cache,) = client.service.store
    await client.release(created.handle)
    await until(lambda: len(client.service.engine.prefixes) == 1)
    segment = cache.sequence.kv
    assert (segment.closed, segment.header.epoch) == (False, 0)


async def test_many_at_once_in_little_memory(serve: Serve) -> None:
    """Texts that outgrow the memory pre-empt each other; each one ends with its own tokens."""
    prompts = [text(seed, 100) for seed in range(8)]
    fields: dict[str, Any] = {"max_new_tokens": 300, "ignore_eos": True}
    async with serve(kv_bytes=1 << 26, lease_seconds=600.0) as fresh:
        expected = [await fresh.generate(p, None, **fields) for p in prompts]
    options: dict[str, Any] = {"kv_bytes": 5 << 17, "prefix_caching": True, "lease_seconds": 600.0}
    async with serve(**options) as client:
        client.service.store.admission.expected_output = 1.0
        texts = await asyncio.gather(*(recovering(client, p, **fields) for p in prompts))
        assert texts == expected
        await client.service.check_integrity()


async def recovering(client: Client, prompt: list[int], **fields: Any) -> list[int]:
    """A generation whose cache is created again when it was released."""
    tokens: list[int] = []
    while len(tokens) < fields["max_new_tokens"]:
        handle = b""
        try:
            created = await client.create(prompt, output_tokens=tokens, **fields)
            handle = created.handle
            tokens += created.first.tokens
            async for response in client.stream(handle, position=len(tokens)):
                tokens += response.result.tokens
        except grpc.aio.AioRpcError as error:
            if reason_of(error) not in ("KV_FULL", "CACHE_NOT_FOUND"):
                raise
        if handle:
            await client.release(handle)
    return tokens


def sequence(owner: str, tokens: list[int]) -> CachedSequence:
    """A sequence whose whole text but the newest token is committed."""
    made = CachedSequence(Request(Text(tokens, limit=1000, owner=owner)), Segment(MEMORY, 1024))
    made.committed = len(tokens) - 1
    return made


TEXTS = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.lists(st.sampled_from([0, 1]), max_size=4)),
    max_size=8,
)


@given(kept=TEXTS, asked=TEXTS, most=st.integers(1, 4))
def test_the_longest_prefix_of_the_same_owner(
    kept: list[tuple[str, list[int]]], asked: list[tuple[str, list[int]]], most: int
) -> None:
    """Against a search through all kept texts, chunk by chunk."""

    def written(chunks: list[int]) -> list[int]:
        return [chunk for chunk in chunks for _ in range(CHUNK_TOKENS)] + [7]

    prefixes = PrefixCache(most)
    for owner, chunks in kept:
        prefixes.retain(sequence(owner, written(chunks)))
    assert len(prefixes) <= most
    for owner, chunks in asked:
        new = sequence(owner, written(chunks))
        found = prefixes.find(new)
        shared = [each.common_prefix(new) for each in prefixes if each.text.owner == owner]
        best = max(shared, default=0) // CHUNK_TOKENS
        assert (0 if found is None else found.common_prefix(new) // CHUNK_TOKENS) == best
        assert found is None or (found.text.owner == owner and not found.kv.closed)
        new.kv.close()
    prefixes.clear()
    assert not len(prefixes)
    assert not prefixes._found
