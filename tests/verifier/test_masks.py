"""Masks that are late: nobody waits for them but their text, and they change no token."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import drafters
import pytest
from calls import failure, reason_of, until
from test_grammar import PROMPT, SAMPLINGS, check, fields, of
from tokenizers import Tokenizer
from verifier_support import Client, serving

from paceline.service import limits
from paceline.verifier.engine import engine
from paceline.verifier.grammar import GrammarError, Grammars, Guide

AMBIGUOUS = 'start: a\na: a a a | a a | "x" | "xx" | /[a-z ]/'
ANY = '{"type": "array", "items": {"type": "integer"}, "minItems": 99}'
DEMO = Path("models/demo/target/tokenizer.json").read_bytes()


@pytest.fixture
async def client(written_model: Path, tmp_path: Path) -> AsyncIterator[Client]:
    sources = ("ngram", "grammar", "recycle")
    async with serving(
        written_model, tmp_path / "v.sock", kv_bytes=1 << 28, sources=sources
    ) as client:
        yield client


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every mask but the first of a text is dear, and is computed while this is set."""
    monkeypatch.setattr(limits, "MASK_SECONDS", -1.0)
    opened, prepare = threading.Event(), Guide.prepare

    def gated(guide: Guide) -> None:
        assert not guide._path or opened.wait(60)
        prepare(guide)

    monkeypatch.setattr(Guide, "prepare", gated)
    yield opened
    opened.set()


@pytest.mark.parametrize("late", ["all", "beyond the time of a step", "every third"])
@pytest.mark.parametrize("sampling", ["greedy", "filtered"])
async def test_late_masks_change_no_token(
    client: Client, monkeypatch: pytest.MonkeyPatch, sampling: str, late: str
) -> None:
    request = fields(5, **SAMPLINGS[sampling])
    plain = await client.generate(PROMPT, None, **request)
    check(plain)
    if late == "all":
        monkeypatch.setattr(limits, "MASK_SECONDS", -1.0)
    elif late == "every third":
        turns, allowed = iter(range(1 << 30)), Guide.allowed
        monkeypatch.setattr(
            Guide, "allowed", lambda guide: allowed(guide) if next(turns) % 3 else None
        )
    else:
        monkeypatch.setattr(limits, "STEP_MASKS_SECONDS", 1e-9)
        none = property(lambda _: 0.0, lambda *_: None)
        monkeypatch.setattr(engine.Engine, "_step_seconds", none, raising=False)
    draws = drafters.all_of(plain, len(PROMPT))
    for draw in (None, draws["right"], draws["mixed"]):
        assert await client.generate(PROMPT, draw, seed=3, **request) == plain
    created = await client.create(PROMPT, **request)
    assert [*created.first.tokens, *await client.rest(created.handle, drafter="local")] == plain
    await client.release(created.handle)


async def test_other_texts_do_not_wait(client: Client, gate: threading.Event) -> None:
    """Nor new ones of the same grammar, up to their first token."""
    request = fields(1, temperature=0.8, top_p=0.9)
    created = [await client.create(PROMPT, **request) for _ in range(4)]
    waiting = [asyncio.create_task(client.rest(each.handle)) for each in created]
    await until(lambda: len(client.service.engine._late) == 4)
    other = await client.generate(PROMPT, None, max_new_tokens=50, ignore_eos=True)
    assert len(other) == 50
    assert not any(task.done() for task in waiting)
    gate.set()
    for each, task in zip(created, waiting, strict=True):
        check([*each.first.tokens, *await task])
        await client.release(each.handle)


async def test_a_text_that_waits_may_be_released_or_resumed(
    client: Client, gate: threading.Event
) -> None:
    request = fields(2, temperature=0.8, top_p=0.9)
    released, resumed = [await client.create(PROMPT, **request) for _ in range(2)]
    late = client.service.engine._late
    reading = asyncio.create_task(failure(await client.begin(released.handle, credits=99)))
    await until(lambda: len(late) == 1)
    await client.release(released.handle)
    assert reason_of(await reading) == "CACHE_NOT_FOUND"
    first = await client.begin(resumed.handle, credits=99)
    await until(lambda: any(not job.done for job in tuple(late)))
    first.cancel()
    rest = asyncio.create_task(client.rest(resumed.handle))
    gate.set()
    check([*resumed.first.tokens, *await rest])
    await client.release(resumed.handle)
    assert not late


async def test_a_verifier_stops_while_texts_wait(client: Client, gate: threading.Event) -> None:
    created = await client.create(PROMPT, **fields(schema=ANY, temperature=0.8, top_p=0.9))
    await client.begin(created.handle, credits=99)
    await until(lambda: len(client.service.engine._late) == 1)


def test_a_mask_that_is_too_much_fails_no_text_that_needs_none() -> None:
    """So that it does not matter who guesses, nor which masks are computed in time."""
    token = Tokenizer.from_buffer(DEMO).token_to_id("x")
    guide = of("grammar", AMBIGUOUS, Grammars(DEMO, 4096, [0])).begin()
    guide.prepare()
    while guide.allowed() is not None:
        guide.push(token)
        guide.prepare()
    with pytest.raises(GrammarError, match="too complex"):
        guide.check()
    assert guide.accepts((token,)) == 1
    guide.push(token)
    guide.pop(1)
    with pytest.raises(GrammarError, match="too complex"):
        guide.check()
