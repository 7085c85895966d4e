"""Local sources: what the verifier guesses itself changes no token, and stays with its owner."""

import json
from collections import Counter
from typing import Any

import pytest
from calls import refusal
from test_grammar import SCHEMA, TOKENIZER
from test_identity import SAMPLINGS
from verifier_support import Client, text

from paceline.sources.ngram import NgramSource
from paceline.tree import TokenTree
from paceline.v1 import sampling_pb2, verifier_pb2
from paceline.verifier.options import SOURCES

PROMPT = text(3, 12) * 4  # it repeats itself
REJECTION = {"temperature": 1.0, "mode": sampling_pb2.ACCEPTANCE_MODE_REJECTION}
LARGE: dict[str, Any] = {"max_new_tokens": 48, "ignore_eos": True}


SERVED: dict[str, Any] = {"target": "written", "sources": SOURCES}
PAGES = {**SERVED, "paged_kv": True, "kv_bytes": 1 << 24}
BOTH = pytest.mark.parametrize("client", [SERVED, PAGES], indirect=True)


def of_sources(rounds: list[Any]) -> int:
    return sum(len(each.tree.tokens) for each in rounds if each.drafter == "local@1")


def steps(rounds: list[Any]) -> int:
    return sum(each.steps for each in rounds)


@BOTH
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_tokens_are_those_of_plain_decoding(client: Client, name: str) -> None:
    fields = {"sampling": sampling_pb2.SamplingParams(**SAMPLINGS[name]), **LARGE}
    plain, rounds, _ = await client.run(PROMPT, "none", **fields)
    assert not of_sources(rounds)
    for _ in range(2):  # the second time the whole text is known
        tokens, rounds, _ = await client.run(PROMPT, None, **fields)
        assert tokens == plain
        assert of_sources(rounds)
    assert len(rounds) < len(plain) / 2, "a text that is known is accepted"


@BOTH
async def test_rejection_sampling_gets_chains(client: Client) -> None:
    fields = {"sampling": sampling_pb2.SamplingParams(seed=3, **REJECTION), **LARGE}
    for _ in range(2):
        _, rounds, _ = await client.run(PROMPT, None, **fields)
        assert of_sources(rounds)
        for each in rounds:
            assert list(each.tree.parents) == list(range(-1, len(each.tree.parents) - 1))


@BOTH
async def test_a_grammar_forces_and_cuts(client: Client) -> None:
    """Names of properties are forced; nodes that the grammar refuses are never checked."""
    sampling = sampling_pb2.SamplingParams(json_schema=json.dumps(SCHEMA), temperature=1.0, seed=4)
    plain, rounds, _ = await client.run(PROMPT, "none", sampling=sampling)
    tokens, rounds, _ = await client.run(PROMPT, None, sampling=sampling, isolated=True)
    assert tokens == plain
    assert sum(len(each.result.accepted_nodes) for each in rounds) > len(plain) // 3
    refused = TOKENIZER.token_to_id("A")

    def wrong(so_far: list[int], _: Any) -> TokenTree:
        right = plain[len(so_far) - len(PROMPT)] if len(so_far) < len(PROMPT) + len(plain) else 0
        return TokenTree((refused, right, refused), (-1, -1, 0))

    name = await client.drafter_service.add(wrong)
    tokens, rounds, _ = await client.run(PROMPT, name, sampling=sampling)
    assert tokens == plain
    cut = [each for each in rounds if refused in each.tree.tokens]
    assert cut
    for each in cut:
        drafted = list(each.tree.tokens)
        assert each.checked_nodes <= len(drafted) - drafted.count(refused)


async def test_the_name_local_stands_for_them_alone(client: Client) -> None:
    """Also where a service has joined. Where they have nothing to propose, they say so; a text
    without a drafter has no trees."""
    model = await client.stub.GetModel(verifier_pb2.GetModelRequest())
    assert model.local_sources == list(SOURCES)
    await client.drafter_service.add(lambda *_: TokenTree.chain([1]))
    plain, rounds, _ = await client.run(PROMPT, "none", **LARGE)
    assert not any(len(each.tree.tokens) for each in rounds)
    for prompt, expected in ((PROMPT, plain), (text(8, 30), None)):
        tokens, rounds, _ = await client.run(prompt, "local", **LARGE)
        assert expected is None or tokens == expected
        assert {each.drafter for each in rounds} == {"local@1"}
        reasons = {each.no_draft for each in rounds if not each.tree.tokens}
        assert reasons <= {0, verifier_pb2.NO_DRAFT_REASON_EMPTY}
    assert not client.drafter_service.opened


@BOTH
@pytest.mark.parametrize("named", [False, True])
async def test_a_drafters_tree_is_merged_with_theirs(client: Client, named: bool) -> None:
    plain, _, _ = await client.run(PROMPT, "none", **LARGE)
    chain = TokenTree.chain([1, 2], [0.9, 0.9])
    name = await client.drafter_service.add(lambda *_: chain)
    tokens, rounds, _ = await client.run(PROMPT, name if named else None, **LARGE)
    assert tokens == plain
    merged = [each.tree for each in rounds if each.drafter == "test@0" and len(each.tree.tokens)]
    assert any(len(tree.tokens) > 2 for tree in merged)
    assert all({1} <= set(tree.tokens) for tree in merged)


async def test_each_round_says_what_each_source_added(client: Client) -> None:
    """Shares add up to the round; those of a drafter have no name."""
    sampling = sampling_pb2.SamplingParams(json_schema=json.dumps(SCHEMA), temperature=1.0, seed=4)
    plain, _, _ = await client.run(PROMPT, "none", sampling=sampling)

    def right(so_far: list[int], _: Any) -> TokenTree:
        return TokenTree.chain(plain[len(so_far) - len(PROMPT) :][:4], [0.9] * 4)

    found: Counter[str] = Counter()
    for with_drafter in (False, True):
        if with_drafter:
            await client.drafter_service.add(right)
        _, rounds, _ = await client.run(PROMPT, None, sampling=sampling, isolated=True)
        for each in rounds:
            if not each.sources:  # all of it is the drafter's
                assert not len(each.tree.tokens) or each.drafter == "test@0"
                continue
            assert sum(s.drafted for s in each.sources) == len(each.tree.tokens)
            assert sum(s.checked for s in each.sources) == each.checked_nodes
            assert sum(s.accepted for s in each.sources) == len(each.result.accepted_nodes)
            assert all(s.accepted <= s.checked <= s.drafted for s in each.sources)
            found.update({s.source: s.accepted for s in each.sources})
            if each.drafter == "local@1":
                assert "" not in {s.source for s in each.sources}
        if not with_drafter:
            assert found["ngram"] + found["recycle"] > 0
            assert found["grammar"] > 0
    assert found[""] > 0


async def test_texts_of_others_are_not_known(client: Client) -> None:
    """Isolated texts neither use earlier ones nor serve later ones."""
    prompt = text(9, 24)
    first, _, _ = await client.run(prompt, None, isolated=True, **LARGE)
    _, rounds, _ = await client.run(prompt, None, isolated=True, **LARGE)
    alone = steps(rounds)
    _, rounds, _ = await client.run(prompt, None, **LARGE)
    assert steps(rounds) >= alone - 1, "an isolated text taught nothing"
    tokens, rounds, _ = await client.run(prompt, None, **LARGE)
    assert tokens == first
    assert steps(rounds) < alone / 2


async def test_a_long_prompt_is_indexed_in_pieces(client: Client) -> None:
    prompt = (text(5, 40) * 40)[:1500]
    plain, _, _ = await client.run(prompt, "none", max_new_tokens=24, ignore_eos=True)
    tokens, rounds, _ = await client.run(prompt, None, max_new_tokens=24, ignore_eos=True)
    assert tokens == plain
    reasons = [each.no_draft for each in rounds[:2]]
    assert verifier_pb2.NO_DRAFT_REASON_EMPTY in reasons, "the first steps do not wait for it"
    assert of_sources(rounds)


async def test_nodes_are_as_many_as_the_request_allows(client: Client) -> None:
    _, rounds, _ = await client.run(PROMPT, None, max_nodes=2, **LARGE)
    assert 0 < max(len(each.tree.tokens) for each in rounds) <= 2


async def test_a_service_is_not_asked_for_what_the_verifier_guesses(client: Client) -> None:
    service = client.drafter_service
    name = await service.add(lambda *_: TokenTree.chain([1]))
    for info in service.infos:
        info.method = "ngram"
    await service.update(service.infos)
    service.opened = []
    _, rounds, _ = await client.run(PROMPT, None, **LARGE)
    assert of_sources(rounds)
    assert not service.opened
    await client.run(PROMPT, name, **LARGE)
    assert service.opened, "unless a text names it"


@pytest.mark.parametrize("method", ["propose", "learn"])
async def test_a_source_that_fails_ends_no_text(
    client: Client, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    plain, _, _ = await client.run(PROMPT, "none", **LARGE)

    def fail(*_: Any) -> None:
        raise RuntimeError("a fault of the source")

    monkeypatch.setattr(NgramSource, method, fail)
    tokens, rounds, _ = await client.run(PROMPT, None, **LARGE)
    assert tokens == plain
    assert not of_sources(rounds)
    monkeypatch.undo()
    _, rounds, _ = await client.run(PROMPT, None, **LARGE)
    assert of_sources(rounds), "later texts have it again"


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_a_grammar_that_allows_nothing_is_named(client: Client, name: str) -> None:
    """No token of the model writes the next letter: the text ends with an error, with drafts and
    without, and the verifier serves on."""
    sampling = sampling_pb2.SamplingParams(regex="[a-c]{2}\u20ac", **SAMPLINGS[name])
    for drafter in ("none", "local", None):
        call = client.run(PROMPT, drafter, sampling=sampling, max_new_tokens=8)
        assert (await refusal(call))[1] == "INVALID_SCHEMA"
    await client.run(PROMPT, None, **LARGE)
