"""What a text used is freed when the text ends, however it ends, without the garbage collector."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from calls import failure, until
from test_grammar import PROMPT, fields, ids
from verifier_support import Client, serving

from paceline.service import limits
from paceline.v1 import sampling_pb2, verifier_pb2
from paceline.verifier import grammar

MANY = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(1000)}}
FAILS = json.dumps({"type": "array", "items": MANY, "minItems": 1})  # too complex after some tokens


@pytest.fixture(autouse=True)
def _no_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nor are small constraints kept for later texts."""
    monkeypatch.setattr(grammar, "_SMALL_BYTES", -1)
    monkeypatch.setattr(limits, "UNUSED_SECONDS", 0.1)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def client(written_model: Path, tmp_path: Path) -> AsyncIterator[Client]:
    socket = tmp_path / "v.sock"
    async with serving(written_model, socket, kv_bytes=1 << 28, prefix_caching=True) as client:
        yield client


async def ends(client: Client) -> None:
    await client.generate(PROMPT * 20, None, **fields(temperature=1.0))


async def is_refused(client: Client) -> None:
    """When it is read, and when its first mask has no token."""
    for sampling in ({"json_schema": '{"type": "nonsense"}'}, {"regex": "☃"}):
        asked = sampling_pb2.SamplingParams(**sampling)
        await failure(client.create(PROMPT, sampling=asked))


async def does_not_match(client: Client) -> None:
    await failure(client.create(PROMPT, output_tokens=ids("]"), **fields()))


async def fails_in_a_step(client: Client) -> None:
    created = await client.create(PROMPT * 20, **fields(schema=FAILS, temperature=1.0))
    await failure(client.rest(created.handle))
    await client.release(created.handle)


async def is_left_while_it_is_made(client: Client) -> None:
    for _ in range(4):
        request = verifier_pb2.CreateCacheRequest(prompt_tokens=PROMPT * 300, **fields())
        call = client.stub.CreateCache(request)
        await until(lambda: len(client.service.store) == 1)
        call.cancel()
        await until(lambda: len(client.service.store) == 0)


async def is_left_in_the_middle(client: Client) -> None:
    created = await client.create(PROMPT * 20, **fields())
    await client.steps(created.handle, 2)
    await client.release(created.handle)


async def is_released_while_it_runs(client: Client) -> None:
    created = await client.create(PROMPT * 20, **fields(schema='{"type": "array"}'))
    call = await client.begin(created.handle, credits=1 << 20)
    await call.read()
    await client.release(created.handle)
    await failure(call)


async def is_drained(client: Client) -> None:
    created = await client.create(PROMPT * 20, **fields())
    draining = asyncio.create_task(client.service.drain())
    await client.rest(created.handle)
    await draining
    await client.release(created.handle)


ENDINGS = (
    *(ends, is_refused, does_not_match, fails_in_a_step, is_left_while_it_is_made),
    *(is_left_in_the_middle, is_released_while_it_runs, is_drained),
)


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_text_that(ending: Callable[[Client], Awaitable[None]], client: Client) -> None:
    await ending(client)
    grammars = client.service._servicer._grammars
    await until(lambda: not grammars._live_bytes and not grammars._live)
    client.service.store.check_integrity()
