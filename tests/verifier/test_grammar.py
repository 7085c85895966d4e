"""Grammars and schemas: the mask leaves exactly what may come next, with every drafter.

Nobody waits for a mask that is late but its text.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import drafters
import grpc
import pytest
import torch
from calls import failure, reason_of, until
from tokenizers import Tokenizer
from verifier_support import TOKENIZER, VOCAB, Client, tokenizer

from paceline.service import limits
from paceline.v1 import sampling_pb2
from paceline.verifier.engine import engine
from paceline.verifier.grammar import Grammar, GrammarError, Grammars, Guide, masked
from paceline.verifier.rpc.servicer import VerifierServicer

SERVED = {"target": "written", "sources": ("ngram", "grammar", "recycle")}
SMALL = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
GRAMMARS = Grammars(TOKENIZER.to_str().encode(), VOCAB, [0])


def compiled(schema: Any = SMALL) -> Grammar:
    return of("json_schema", json.dumps(schema))


def of(kind: Any, source: str, grammars: Grammars = GRAMMARS) -> Grammar:
    return asyncio.run(grammars.compile(kind, source))


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def allowed(grammar: Grammar, text: str) -> set[str]:
    row = masked(torch.zeros(VOCAB), grammar.after(ids(text)).begin().allowed())
    assert set(row.tolist()) <= {0.0, -torch.inf}
    found = row.isfinite().nonzero()[:, 0].tolist()
    return {"<end>" if token == 0 else TOKENIZER.decode([token]) for token in found}


def test_the_mask_leaves_what_may_come_next() -> None:
    grammar = compiled()
    white = {" "}
    assert allowed(grammar, "") == {"{"}
    assert allowed(grammar, '{"ok":') == {"t", "f"} | white
    assert allowed(grammar, '{"ok":true,"n":') == set("0123456789") | white
    assert allowed(grammar, '{"ok":true,"n":7}') == {"<end>"}
    assert allowed(grammar, '{"ok":' + " " * 32) == {"t", "f"}, "white space has an end"


@pytest.mark.parametrize("text", ["[", '{"ok":1', '{"ok":true,"n":7}x'])
def test_a_text_that_does_not_match_is_refused(text: str) -> None:
    with pytest.raises(GrammarError):
        compiled().after(ids(text))


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "nonsense"}, {"$ref": "http://example.org/schema"}, {"not": {"type": "string"}}),
        {"type": "string", "pattern": "("}, {"allOf": [{"type": "string"}, {"type": "integer"}]},
        *([1], "text"),
    ],
)  # fmt: skip
def test_an_unsupported_schema_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match="schema"):
        compiled(schema)


def test_a_schema_needs_an_end_of_sequence_token() -> None:
    with pytest.raises(GrammarError, match="end-of-sequence"):
        of("json_schema", "{}", Grammars(TOKENIZER.to_str().encode(), VOCAB, []))


def test_regular_expressions_and_grammars() -> None:
    assert allowed(of("regex", "[ab]c|d"), "") == {"a", "b", "d"}
    assert allowed(of("regex", "[ab]c|d"), "ac") == {"<end>"}
    for source in ('start: "a" (B | "c")\nB: /[xy]/', 'root ::= "a" (b | "c")\nb ::= [xy]'):
        assert allowed(of("grammar", source), "a") == {"x", "y", "c"}


def test_a_grammar_may_name_tokens_by_their_ids() -> None:
    wide = tokenizer()
    wide.add_tokens([f"<t{index}>" for index in range(2000)])
    grammars = Grammars(wide.to_str().encode(), wide.get_vocab_size(), [0])
    first, last = wide.token_to_id("<t0>"), wide.token_to_id("<t1999>")
    grammar = of("grammar", f'start: <[{last}]> <[^{first},0]>* | "a"', grammars)
    guide = grammar.begin()
    assert guide.accepts([last, last, last]) == 3
    assert guide.accepts([last, first]) == 1
    assert guide.accepts([first]) == 0
    with pytest.raises(GrammarError, match="is not supported"):
        of("grammar", "start: <[999999]>", grammars)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        *(("regex", "("), ("regex", "(?=a)a"), ("grammar", "start: ("), ("grammar", "nonsense")),
        *(("grammar", " "), ("grammar", "# nothing"), ("grammar", 'start ::= "a"')),
    ],
)
def test_wrong_expressions_and_grammars_are_refused(kind: Any, source: str) -> None:
    what = "regular expression" if kind == "regex" else "grammar"
    with pytest.raises(GrammarError, match=f"{what} (is not supported|cannot be read)"):
        of(kind, source)


PROMPT = [7, 8, 9, 10]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "gear": {"enum": ["road", "track", "gravel"]},
        "laps": {"type": "integer", "minimum": 0, "maximum": 999},
        "names": {
            "type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,4}$"}, "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["gear", "laps", "names"],
    "additionalProperties": False,
}  # fmt: skip
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T=1": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1},
}


def fields(seed: int = 0, schema: str | None = None, **sampling: Any) -> dict[str, Any]:
    schema = json.dumps(SCHEMA) if schema is None else schema
    return {"sampling": sampling_pb2.SamplingParams(json_schema=schema, seed=seed, **sampling)}


def check(tokens: list[int]) -> None:
    assert tokens[-1] == 0
    value = json.loads(TOKENIZER.decode(tokens))
    assert set(value) == {"gear", "laps", "names"}
    assert value["gear"] in ("road", "track", "gravel")
    assert 0 <= value["laps"] <= 999
    assert 1 <= len(value["names"]) <= 3
    assert all(name.isalpha() and len(name) <= 4 for name in value["names"])


async def test_valid_and_identical_with_every_drafter(client: Client) -> None:
    for seed, sampling in enumerate(SAMPLINGS.values()):
        request = fields(seed, **sampling)
        plain = await client.generate(PROMPT, None, **request)
        check(plain)
        for name, draw in drafters.all_of(plain, len(PROMPT)).items():
            assert await client.generate(PROMPT, draw, seed=3, **request) == plain, name


async def test_rejection_sampling_with_a_schema(client: Client) -> None:
    request = fields(1, temperature=1.0, mode=sampling_pb2.ACCEPTANCE_MODE_REJECTION)
    plain = await client.generate(PROMPT, None, **request)
    check(plain)
    check(await client.generate(PROMPT, drafters.wrong(plain, len(PROMPT)), **request))


async def test_a_resumed_text_continues_in_its_schema(client: Client) -> None:
    """As after a restart: the emitted tokens give the position in the schema."""
    request = fields(3, temperature=1.0)
    whole = await client.generate(PROMPT, None, **request)
    for cut in range(0, len(whole), 5):
        created = await client.create(PROMPT, output_tokens=whole[:cut], **request)
        assert list(created.first.tokens) == [whole[cut]]
        await client.release(created.handle)
    with pytest.raises(grpc.aio.AioRpcError, match="match its constraint") as raised:
        await client.create(PROMPT, output_tokens=[*whole[:5], whole[0]], **request)
    assert reason_of(raised.value) == "INVALID_SCHEMA"


async def test_log_probabilities_are_the_models_own(client: Client) -> None:
    """They are computed without the mask: the likeliest tokens need not be allowed."""
    request = {**fields(temperature=1.0), "top_logprobs": 20}
    created = await client.create(PROMPT, **request)
    brace = TOKENIZER.token_to_id("{")
    assert list(created.first.tokens) == [brace]
    assert created.first.logprobs[0] < -0.01
    assert len(set(created.first.top_logprobs[0].tokens) - {brace}) >= 19


async def test_bad_schemas_are_refused(client: Client) -> None:
    too_long = json.dumps({"enum": ["x" * 70_000]})
    for schema in ('{"type": "nonsense"}', "no json", too_long):
        with pytest.raises(grpc.aio.AioRpcError, match="schema") as raised:
            await client.create(PROMPT, **fields(schema=schema))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason_of(raised.value) == "INVALID_SCHEMA"


@pytest.mark.parametrize("tokenizer_json", [TOKENIZER.to_str().encode(), b"", b"no tokenizer"])
def test_the_tokenizer_is_prepared_before_the_first_constraint(tokenizer_json: bytes) -> None:
    """It takes a second where it is large, in which no text goes on."""
    grammars = Grammars(tokenizer_json, VOCAB, [0])
    VerifierServicer(Mock(grammars=lambda: grammars), *[Mock()] * 5)
    for thread in threading.enumerate():
        if thread.name == "grammars":
            thread.join(60)
    assert ("_forms" in vars(grammars)) is (tokenizer_json[:1] == b"{")


AMBIGUOUS = 'start: a\na: a a a | a a | "x" | "xx" | /[a-z ]/'
ANY = '{"type": "array", "items": {"type": "integer"}, "minItems": 99}'
DEMO = Path("models/demo/target/tokenizer.json").read_bytes()


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


@pytest.mark.parametrize(
    ("sampling", "late"),
    [
        *(("greedy", "all"), ("filtered", "all")),
        *(("filtered", "beyond the time of a step"), ("greedy", "every third")),
    ],
)
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
