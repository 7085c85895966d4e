"""Join: trees come from drafter services, and nothing that a service does changes a token."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from typing import Any

import drafters
import grpc
import pytest
from calls import remaining, until
from fakes.exchange import Drafter, DrafterService
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from verifier_support import PROMPT, VOCAB, Client, fallbacks_of, tokens_of

from paceline.tree import TokenTree
from paceline.v1 import drafter_pb2, exchange_pb2, tree_pb2, verifier_pb2
from paceline.verifier.engine import drafting
from paceline.verifier.engine.report import NoDraft

FIELDS: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
LONG_TEXT = {**FIELDS, "max_new_tokens": 100}
pytestmark = pytest.mark.usefixtures("no_delays")


# Both carriers


async def test_one_message_a_step(client: Client, service: DrafterService) -> None:
    """Eight generations that are drafted for together."""
    name = await service.add(drafters.random_tree)
    handles = [(await client.create(PROMPT, **FIELDS)).handle for _ in range(8)]
    service.paused = []
    streams = [asyncio.create_task(client.rest(each, drafter=name)) for each in handles]
    await until(lambda: len(service.paused or ()) == 8)
    before, steps = service.messages, client.service.engine._steps
    await service.answer()
    await asyncio.gather(*streams)
    await until(lambda: not service.sequences)
    assert service.messages - before <= client.service.engine._steps - steps + 8
    (joined,) = client.service.joined()
    assert joined.sequences == 0


async def test_each_user_is_an_owner_of_texts(client: Client) -> None:
    """And an isolated text has none."""
    async with client.new_drafter_service() as service:
        name = await service.add(lambda *_: TokenTree.chain([1, 2, 3]))
        for user, isolated in (("anna", 0), ("bob", 0), ("", 0), ("anna", 0), ("anna", 1)):
            created = await client.create(PROMPT, user=user, **FIELDS)
            await client.responses(created.handle, drafter=name, isolated=bool(isolated))
        anna, bob, nobody, again, alone = (opened.owner for opened in service.opened)
        assert len({anna, bob, nobody, ""}) == 4
        assert (again, "anna" in anna, alone) == (anna, False, "")


async def test_what_a_drafter_is_told(client: Client, service: DrafterService) -> None:
    """Text, sampling and capability; then new tokens and limits. The statistics come back."""
    name = await service.add(lambda *_: TokenTree.chain([1, 2, 3]))
    fields: dict[str, Any] = {**FIELDS, "max_new_tokens": 6}
    created = await client.create(PROMPT, output_tokens=[7], **fields)
    service.paused = []
    reading = asyncio.create_task(client.responses(created.handle, drafter=name, max_nodes=2))
    await until(lambda: bool(service.paused))
    ((opened,), (first,)) = service.opened, service.paused
    assert list(opened.tokens) == [*PROMPT, 7, *created.first.tokens]
    assert (opened.prompt_length, opened.read_grant) == (len(PROMPT), created.read_grant)
    assert (opened.drafter, opened.version, opened.sequence) == ("test", "0", 1)
    assert opened.owner
    assert (first.round, list(first.new_tokens), first.total_length) == (1, [], 7)
    assert (first.node_budget, first.max_depth, first.committed_length) == (2, 3, 6)
    await service.answer()
    responses = await reading
    assert responses[0].steps == 0, "the first token of the cache is sent again"
    drafted = responses[1]
    assert list(drafted.tree.tokens) == [1, 2]
    assert (drafted.drafter, drafted.checked_nodes) == (name, 2)
    assert responses[-1].no_draft == verifier_pb2.NO_DRAFT_REASON_LAST_TOKEN
    await until(lambda: not service.sequences)


# Which drafter


async def test_names_choose_the_drafter(client: Client, far_service: DrafterService) -> None:
    """Absent: the default of the first service. A text is sent to no other than it names."""
    near, service = client.drafter_service, far_service
    created = await client.create(PROMPT, **FIELDS)
    (response,) = await client.steps(created.handle, 1, drafter=None)
    assert response.no_draft == verifier_pb2.NO_DRAFT_REASON_NO_DRAFTER, "nobody has joined"
    error = await client.refusal(created.handle, drafter="x" * 257)
    assert error == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_DRAFTER")
    await near.add(lambda *_: TokenTree.chain([1]))
    await near.add(lambda *_: TokenTree.chain([1, 2]))
    await service.add(lambda *_: TokenTree.chain([1, 2, 3]))
    for drafter, nodes, opened in (
        (None, 1, [1, 0]),
        ("test", 1, [1, 0]),
        ("test@1", 2, [1, 0]),
        ("far", 3, [0, 1]),
        ("far@0", 3, [0, 1]),
        ("none", 0, [0, 0]),
        ("", 1, [1, 0]),
        ("test@99", 0, [0, 0]),
        ("another", 0, [0, 0]),
    ):
        near.opened, service.opened = [], []
        created = await client.create(PROMPT, drafter=drafter, **FIELDS)
        (response,) = await client.steps(created.handle, 1, drafter=drafter)
        assert len(response.tree.tokens) == nodes, drafter
        assert [len(near.opened), len(service.opened)] == opened, drafter
        if not nodes:
            reason = "NO_DRAFTER" if drafter == "none" else "NOT_READY"
            assert response.no_draft == getattr(verifier_pb2, f"NO_DRAFT_REASON_{reason}")
        await client.release(created.handle)
    await near.leave()
    created = await client.create(PROMPT, **FIELDS)
    (response,) = await client.steps(created.handle, 1, drafter=None)
    assert response.drafter == "far@0", "now it is the first"


async def test_the_socket_is_preferred_then_the_fewest_sequences(client: Client) -> None:
    async with (
        client.new_drafter_service(socket=False) as far,
        client.new_drafter_service() as near,
        client.new_drafter_service() as nearest,
    ):
        for each in (far, near, nearest):
            await each.add(drafters.nothing)
        handles = [(await client.create(PROMPT, **FIELDS)).handle for _ in range(4)]
        calls = []
        for handle in handles:
            calls.append(await client.begin(handle, credits=1, drafter="test"))
            assert (await calls[-1].read()).no_draft == verifier_pb2.NO_DRAFT_REASON_EMPTY
        assert [len(each.opened) for each in (far, near, nearest)] == [0, 2, 2]


@pytest.mark.parametrize("fault", ["refuses", "draws an invalid tree", "is late"])
async def test_a_service_that_fails_takes_no_texts_from_others(fault: str, client: Client) -> None:
    """It offers the same drafter, and would be the first to be asked."""
    async with client.new_drafter_service() as good, client.new_drafter_service() as bad:
        drawn = tree(tokens=[VOCAB], parents=[-1]) if fault == "draws an invalid tree" else None
        await bad.add(lambda *_: drawn)
        await good.add(lambda *_: TokenTree.chain([1]))
        if fault == "is late":
            bad.paused = []
        for _ in range(4):
            created = await client.create(PROMPT, **FIELDS)
            rounds = await client.steps(created.handle, 6, drafter="test", draft_timeout_ms=200)
        assert all(each.tree.tokens for each in rounds)
        assert len(good.opened) >= 3
        assert len(bad.opened) <= 2


async def test_a_draining_version_gets_no_new_sequence(client: Client) -> None:
    service = client.drafter_service
    names = [await service.add(drafters.right([1] * 99, 0)) for _ in range(2)]
    infos = [service.info("0"), service.info("1")]
    infos[0].draining = True
    await service.update(infos)
    created = await client.create(PROMPT, **FIELDS)
    for position, (name, drafted) in enumerate(zip(names, (False, True), strict=True), 1):
        (response,) = await client.steps(created.handle, 1, position, drafter=name)
        assert bool(response.tree.tokens) == drafted


async def test_hidden_states_and_scores_of_all_versions_are_kept(client: Client) -> None:
    """Of those with traffic, or of the one that is named; not those of another target."""

    await client.drafter_service.join()
    infos = [
        drafter_pb2.DrafterInfo(
            name="test", version=version, traffic_share=share, hidden_state_layers=layers,
            hidden_state_window=window,
        )
        for version, layers, share, window in (
            ("1", [0], 0.5, 16), ("2", [1], 0.5, 32), ("3", [1], 0.0, 0), ("4", [0, 2], 0.0, 0),
        )
    ]  # fmt: skip
    infos[1].scored_layers.append(-1)
    infos[1].kv_policy = "verified"
    await client.drafter_service.update(infos)
    for drafter, layers, window in (
        (None, (0, 1), 32),
        ("test@3", (1,), 0),
        ("test@4", (), 0),
        ("none", (), 0),
        ("another", (), 0),
    ):
        created = await client.create(PROMPT, drafter=drafter)
        (cache,) = client.service.store
        taps = cache.sequence.request.taps
        assert (((), 0) if taps is None else (taps.layers, taps.window)) == (layers, window)
        scored = {("verified", (1,))} if drafter is None else set()
        assert cache.policies.keys() == scored
        await client.release(created.handle)


# Late, refused and wrong trees


async def test_a_late_tree_is_ignored_and_the_next_is_used(
    client: Client, service: DrafterService
) -> None:
    plain = await client.generate(PROMPT, None, **FIELDS)
    name = await service.add(drafters.right(plain, len(PROMPT), depth=2))
    created = await client.create(PROMPT, **FIELDS)
    call = await client.begin(created.handle, drafter=name, draft_timeout_ms=50)
    while not (await call.step()).tree.tokens:
        assert len(call.read_rounds) < 20, "it drafts in time in the end"
    service.paused = []
    late = await call.step()
    assert late.no_draft == verifier_pb2.NO_DRAFT_REASON_LATE
    assert list(late.fallbacks) == ["drafter_timeout"]
    for _ in range(2):
        assert (await call.step()).no_draft == verifier_pb2.NO_DRAFT_REASON_NOT_READY
    assert len(service.paused) == 1, "no further round before the answer"
    await service.answer()
    while not (await call.step()).tree.tokens:
        pass
    assert len(call.read_rounds[-1].result.tokens) == 3, "the tree is for the text as it is now"
    tokens = [*created.first.tokens, *tokens_of(call.read_rounds)]
    assert tokens == plain[: len(tokens)]


async def test_a_drafter_that_hangs_is_left(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "HUNG_SECONDS", 0.0)
    service = client.drafter_service
    name = await service.add(drafters.nothing)
    created = await client.create(PROMPT, **FIELDS)
    service.paused = []
    responses = await client.steps(created.handle, 3, drafter=name, draft_timeout_ms=20)
    assert "drafter_hung" in fallbacks_of(responses)
    await until(lambda: len(service.opened) == 2)
    service.paused = None
    position = 1 + len(tokens_of(responses))
    assert len(await client.rest(created.handle, position, drafter=name)) == 40 - position


async def test_a_generation_goes_on_while_its_drafter_opens_it(
    client: Client, service: DrafterService
) -> None:
    """No round is requested before it is open; then trees are used."""
    plain = await client.generate(PROMPT, None, **FIELDS)
    name = await service.add(drafters.right(plain, len(PROMPT)))
    created = await client.create(PROMPT, **FIELDS)
    call = await client.begin(created.handle, drafter=name, always_draft=False)
    service.silent = True
    for _ in range(4):
        assert (await call.step()).no_draft == verifier_pb2.NO_DRAFT_REASON_NOT_READY
    await until(lambda: bool(service.opened))
    (opened,) = service.opened
    service.silent = False
    message = exchange_pb2.JoinResponse(open=[opened])
    await service.received(message)
    service.opened.pop()
    await until(lambda: bool(service.sequences))
    while not (await call.step()).tree.tokens:
        assert len(call.read_rounds) < 20, "it drafts once it is open"
    assert not fallbacks_of(call.read_rounds)
    tokens = [*created.first.tokens, *tokens_of(call.read_rounds)]
    assert tokens == plain[: len(tokens)]


@pytest.mark.parametrize("reason", ["REFUSED", "DRAFTER_REPLACED"])
@pytest.mark.parametrize("when", ["when it is opened", "later"])
async def test_a_refused_sequence_is_opened_again(when: str, reason: str, client: Client) -> None:
    """Later, so that a drafter which cannot draft is not asked all the time."""
    service = client.drafter_service
    service.reason = reason
    trees = iter([TokenTree.chain([1]), None])
    name = await service.add(lambda *_: next(trees, TokenTree.chain([1])))
    service.refuses = when == "when it is opened"
    created = await client.create(PROMPT, **FIELDS)
    call = await client.begin(created.handle, credits=1, drafter=name)
    response = await call.read()
    if when == "later":
        assert list(response.tree.tokens) == [1]
        response = await call.step()
    service.refuses = False
    if reason == "REFUSED":
        assert list(response.fallbacks) == ["drafter_refused"]
        assert response.fallback_message.startswith("REFUSED: it ")
    else:
        assert not response.fallbacks, "it is no failure"
    assert response.no_draft == verifier_pb2.NO_DRAFT_REASON_NOT_READY
    responses = [await call.step() for _ in range(2)]
    assert any(each.tree.tokens for each in responses)
    assert len(service.opened) == 2


def tree(**fields: Any) -> tree_pb2.TokenTree:
    return tree_pb2.TokenTree(**fields)


TREES = [
    (tree(tokens=[1], parents=[0]), "BAD_TREE"),
    (tree(tokens=[1], parents=[-2]), "BAD_TREE"),
    (tree(tokens=[], parents=[-1]), "BAD_TREE"),
    (tree(tokens=[1], parents=[-1], confidences=[math.nan]), "BAD_TREE"),
    (tree(tokens=[1], parents=[-1], confidences=[2.0]), "BAD_TREE"),
    (tree(tokens=[1], parents=[-1], distributions=[tree_pb2.NodeDistribution()]), "BAD_TREE"),
    (tree(tokens=[VOCAB], parents=[-1]), "TOKEN_OUT_OF_VOCABULARY"),
    (tree(tokens=[1] * 9, parents=[-1] * 9), "TREE_TOO_LARGE"),
    (tree(tokens=[1] * 1_000_000, parents=[-1] * 1_000_000), "TREE_TOO_LARGE"),
]


async def test_invalid_trees(client: Client) -> None:
    """They close their sequence; another one of the service keeps its drafts."""
    plain = await client.generate(PROMPT, None, **FIELDS)
    service = client.drafter_service
    good = await service.add(drafters.right(plain, len(PROMPT), depth=1))
    for invalid, reason in TREES:
        name = await service.add(lambda *_, invalid=invalid: invalid)
        created, beside = [await client.create(PROMPT, **FIELDS) for _ in range(2)]
        (response,), others = await asyncio.gather(
            client.steps(created.handle, 1, drafter=name, max_nodes=8),
            client.responses(beside.handle, drafter=good),
        )
        assert (list(response.fallbacks), len(response.tree.tokens)) == (["invalid_tree"], 0)
        assert response.fallback_message.startswith(f"{reason}: ")
        assert list(response.result.tokens) == plain[1:2]
        assert [*beside.first.tokens, *tokens_of(others)] == plain
        assert all(each.tree.tokens for each in others[:-1])
        for each in (created, beside):
            await client.release(each.handle)
        service.remove(name)


async def test_what_a_service_reports_is_bounded(client: Client) -> None:
    """Numbers and texts of any size do not break the stream of a client."""
    service = client.drafter_service
    name = await service.add(drafters.nothing)
    service.paused, service.silent = [], True  # it says itself what was opened
    created = await client.create(PROMPT, **FIELDS)
    call = await client.begin(created.handle, credits=1, drafter=name, draft_timeout_ms=2**32 - 1)
    await until(lambda: bool(service.paused))
    opened = exchange_pb2.SequenceOpened(sequence=1, version="v" * 2_000_000)
    drafted = exchange_pb2.DraftedTree(sequence=1, round=1, tree=tree(tokens=[1], parents=[-1]))
    for field in ("draft_us", "queue_us", "kv_bytes"):
        setattr(drafted, field, 2**64 - 1)
    await service.send(opened=[opened], trees=[drafted])
    response = await call.read()
    assert len(response.drafter) < 300
    assert response.draft_us <= response.round_us
    service.paused = []
    await call.write(verifier_pb2.GenerateRequest(credits=1))
    await until(lambda: bool(service.paused))
    refused = exchange_pb2.SequenceRefused(sequence=1, reason="R", message="m" * 2_000_000)
    await service.send(refused=[refused])
    response = await call.read()
    assert list(response.fallbacks) == ["drafter_refused"]
    assert len(response.fallback_message) <= 1024


# Drafters that hardly draft are named once for each reason, in the log and in the metrics


async def unused(client: Client, caplog: pytest.LogCaptureFixture, **start: Any) -> list[str]:
    """What two texts have logged of their drafter."""
    with caplog.at_level(logging.WARNING, "paceline"):
        for _ in range(2):
            created = await client.create(PROMPT, **LONG_TEXT)
            await client.responses(created.handle, **start)
    return [text for text in caplog.messages if text.startswith("the drafter")]


async def test_a_drafter_that_nobody_offers(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    (said,) = await unused(client, caplog, drafter="missing")
    assert said.endswith("asked in 0: no drafter service that has joined offers it")
    assert client.service.engine.unused_drafters == [("missing", "not_ready")]


async def test_a_drafter_that_drafts_or_has_nothing_to_say_is_not_named(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    plain = await client.generate(PROMPT, None, **LONG_TEXT)
    for draw in (drafters.wrong(plain, len(PROMPT)), drafters.nothing):
        async with client.new_drafter_service() as service:
            name = await service.add(draw)
            assert not await unused(client, caplog, drafter=name)
    assert not await unused(client, caplog, drafter="local")
    assert not await unused(client, caplog, drafter="none")
    assert not client.service.engine.unused_drafters


def test_whether_a_drafter_is_unused_is_told_by_its_recent_steps() -> None:
    """The reason is the most frequent one; a drafter that drafts again is unused no more."""
    use = drafting.DrafterUse()
    for step in range(47):
        use.note(NoDraft.LATE if step % 3 else NoDraft.NOT_READY)
        assert use.unused is None
    use.note(NoDraft.NOT_READY)
    assert use.unused is NoDraft.LATE
    for _ in range(3):
        use.note(None)
    assert use.unused is None
    for _ in range(10_000):
        use.note(None)
    for _ in range(20_000):
        use.note(NoDraft.NODE_BUDGET)
    assert use.unused is NoDraft.NODE_BUDGET


# Any behaviour

ACTIONS = ("right", "random", "empty", "invalid", "refuse", "late", "leave", "rejoin", "unload")


def acting(right: Drafter, action: list[str]) -> Drafter:
    """A drafter that does what ``action`` says at the time."""

    drawn = {"empty": TokenTree(), "invalid": tree(tokens=[VOCAB], parents=[-1]), "refuse": None}

    def draft(text: list[int], rng: random.Random) -> Any:
        if action[0] in drawn:
            return drawn[action[0]]
        return (drafters.random_tree if action[0] == "random" else right)(text, rng)

    return draft


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(1, 4)), max_size=12),
    socket=st.booleans(),
    generations=st.integers(1, 3),
)
async def test_no_behaviour_changes_a_token(
    actions: list[tuple[str, int]], socket: bool, generations: int, client: Client
) -> None:
    plain = await client.generate(PROMPT, None, **FIELDS)
    action = ["right"]
    async with client.new_drafter_service(socket=socket) as service:
        name = await service.add(acting(drafters.right(plain, len(PROMPT), 2), action))
        infos = service.infos
        texts = [await client.create(PROMPT, **FIELDS) for _ in range(generations)]
        calls = [
            await client.begin(each.handle, drafter=name, draft_timeout_ms=20) for each in texts
        ]
        tokens = [list(each.first.tokens) for each in texts]
        for act, steps in actions:
            action[0] = act
            if act == "late" and service.paused is None:
                service.paused = []
            elif act != "late" and service.paused is not None:
                await service.answer() if service.joined else setattr(service, "paused", None)
            if act == "leave" and service.joined:
                await service.leave()
            elif act == "rejoin" and service.joined is None:
                service.infos = infos
                await service.join()
            elif act == "unload" and service.joined:
                await service.update([])
            elif service.joined and not service.infos:
                await service.update(infos)
            for call, emitted in zip(calls, tokens, strict=True):
                if len(emitted) < 40:
                    await call.write(verifier_pb2.GenerateRequest(credits=steps))
            for call, emitted in zip(calls, tokens, strict=True):
                left = steps
                while left and len(emitted) < 40:
                    response = await call.read()
                    assert response.position == len(emitted)
                    emitted += response.result.tokens
                    left -= response.steps
        for each, call, emitted in zip(texts, calls, tokens, strict=True):
            if len(emitted) < 40:
                await call.write(verifier_pb2.GenerateRequest(credits=100))
                emitted += tokens_of(await remaining(call))
            assert emitted == plain
            await client.release(each.handle)
    await client.service.check_integrity()
