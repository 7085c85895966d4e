"""Constraints that are made to cost: they are refused, and nobody else waits for them."""

import asyncio
import json
import logging
import os
import re
import resource
import time
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from calls import reason_of
from test_grammar import PROMPT, TOKENIZER, fields, ids
from verifier_support import VOCAB, Serve

from paceline.service import limits
from paceline.verifier.grammar import GrammarError, Grammars, GrammarsBusy

ENDLESS = json.dumps({"type": "integer", "multipleOf": 99999989})
HOSTILE: dict[str, tuple[Any, str]] = {
    "multiples of a large prime": ("json_schema", ENDLESS),
    "multiples of several primes": (
        "json_schema",
        json.dumps({"allOf": [{"type": "integer", "multipleOf": p} for p in (97, 89, 83, 79)]}),
    ),
    "nested repetitions": ("regex", "(((a{1,900}b?){1,900}c?){1,900}d?){1,900}"),
    "a long look for the end": ("regex", "(.*a.{1,300}){1,300}"),
    "a grammar of repetitions": (
        "grammar",
        "start: (A{1,9999} B{1,9999}){1,9999}\nA: /x{1,9999}/\nB: /y/",
    ),
    "deep nesting": ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "deep groups": ("regex", "(" * 20000 + "a" + ")" * 20000),
    "GBNF without an end": ("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
    "many alternatives": ("regex", "|".join(f"{n:05}.*x" for n in range(6000))),
}


def grammars() -> Grammars:
    return Grammars(TOKENIZER.to_str().encode(), VOCAB, [0])


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONSTRAINT_SECONDS", 1)
    monkeypatch.setattr(limits, "CONSTRAINT_MEMORY", 96 << 20)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.usefixtures("short")
async def test_what_costs_too_much_is_refused(name: str) -> None:
    """Or is cheap: then its first mask is there."""
    kind, source = HOSTILE[name]
    said = ""
    try:
        assert (await grammars().compile(kind, source)).begin().allowed().any()
    except GrammarError as error:
        said = str(error)
    assert source != ENDLESS or re.search(r"JSON schema takes more than 1 s .* simpler", said)


async def test_cancelled_at_any_moment_it_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in each turn of the event loop in which its process starts."""
    monkeypatch.setattr(limits, "CONSTRAINTS_COMPILING", 1)
    compiler = grammars()
    for turns in range(24):
        task = asyncio.create_task(compiler.compile("regex", f"a{{{turns + 1}}}"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=60)
        assert task.done(), f"it hangs when it is cancelled in turn {turns}"
    assert not compiler._places.locked()
    assert compiler._waiting == 0


async def test_without_files_it_may_be_tried_again() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    compiler = grammars()
    await compiler.compile("regex", "a+")
    with ExitStack() as opened:
        opened.callback(
            resource.setrlimit, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)
        )
        os.close(lowest := os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, most))
        with pytest.raises(GrammarsBusy, match="no process can be started"):
            await compiler.compile("regex", "b+")
    await compiler.compile("regex", "b+")


async def test_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONSTRAINTS_WAITING", 3)
    compiler = grammars()
    tasks = [asyncio.create_task(compiler.compile("json_schema", ENDLESS)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(GrammarsBusy, match="3 constraints"):
        await compiler.compile("regex", "a+")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_memory_of_those_in_use_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = grammars()
    kept = await compiler.compile("regex", "a+")
    assert await compiler.compile("regex", "a+") is kept, "one in use is compiled once"
    monkeypatch.setattr(limits, "CONSTRAINTS_LIVE_BYTES", compiler._live_bytes * 3 // 2)
    with pytest.raises(GrammarsBusy, match="in use"):
        await compiler.compile("regex", "b+")
    del kept
    await compiler.compile("regex", "b+")


@pytest.mark.usefixtures("short")
async def test_a_verifier_answers_others_and_stops(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six callers that leave, as a browser does that is closed; and one that stays."""
    monkeypatch.setattr(limits, "CONSTRAINT_SECONDS", 600)
    monkeypatch.setattr(limits, "CONSTRAINT_MEMORY", 1 << 40)
    async with serve("written") as client:
        calls = [
            asyncio.create_task(client.create(PROMPT, **fields(schema=ENDLESS))) for _ in "123456"
        ]
        await asyncio.sleep(0.3)
        for call in calls:
            call.cancel()
        created = await client.create(PROMPT, **fields())
        await client.release(created.handle)
        staying = asyncio.create_task(client.create(PROMPT, **fields(schema=ENDLESS)))
        await asyncio.sleep(0.1)
        began = time.monotonic()
    assert time.monotonic() - began < 60
    await asyncio.gather(staying, return_exceptions=True)


async def test_one_that_fails_after_some_tokens(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """Is the caller's error, and the log has nothing of the text."""
    many = {"properties": {f"p{n}": {"type": "integer"} for n in range(2000)}}
    schema = json.dumps({"type": "object", "additionalProperties": False, **many})
    caplog.set_level(logging.DEBUG)
    async with serve("written") as client:
        other = await client.create(PROMPT, **fields())
        with pytest.raises(grpc.aio.AioRpcError, match="complex") as raised:
            await client.generate(PROMPT, None, **fields(schema=schema, temperature=1.0))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason_of(raised.value) == "INVALID_SCHEMA"
        await client.release(other.handle)
    assert "⟦" not in caplog.text
    assert "Tokens:" not in caplog.text
    assert "Traceback" not in caplog.text


def test_a_text_that_does_not_match_is_not_shown() -> None:
    grammar = asyncio.run(grammars().compile("regex", "abc"))
    with pytest.raises(GrammarError) as raised:
        grammar.after(ids("abd"))
    assert "abd" not in str(raised.value)
