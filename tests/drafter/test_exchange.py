"""Sequences of a verifier at a drafter service, over the socket and over the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import product
from typing import Any

import pytest
from calls import until
from fakes.drafter import TARGET, TOKENIZER, FakeDrafter
from fakes.exchange import CARRIERS, VOCAB, Refused
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import packages_after
from prometheus_client import CollectorRegistry

from paceline.v1 import drafter_pb2, exchange_pb2, sampling_pb2

from .conftest import Drafting, drafting

TEXT = [5, 6, 7, 8, 9, 10, 11, 1, 2, 5, 6, 7]


@pytest.fixture(params=CARRIERS)
async def fake(request: pytest.FixtureRequest) -> AsyncIterator[Drafting]:
    """A service with one fake drafter, with each carrier."""
    FakeDrafter.loaded.clear()
    async with drafting("x=fake", carrier=request.param) as service:
        yield service


def sequences() -> list[Any]:
    return [each for drafter in FakeDrafter.loaded for each in drafter.sequences]


async def until_closed(count: int) -> None:
    """Until so many sequences of fakes were started, and all are closed once."""

    def closed() -> bool:
        assert all(sequence.closed <= 1 for sequence in sequences())
        return len(sequences()) == count and all(sequence.closed for sequence in sequences())

    await until(closed)


async def test_a_round_is_answered(ngram: Drafting) -> None:
    text = await ngram.open(TEXT)
    opened = text.opened
    assert (opened.drafter, opened.version, opened.method) == ("ngram", "1", "ngram")
    assert (opened.max_nodes, opened.kv_transport) == (32, "")
    tree = await text.round()
    assert list(tree.tree.tokens)[:4] == [8, 9, 10, 11]
    tree = await text.round(range(100, 900))
    assert not tree.tree.tokens, "more than one slice"
    tree = await text.round([*range(500, 510), 3, 3, 3, 500, 501, 502])
    assert list(tree.tree.tokens)[:3] == [503, 504, 505]
    await text.end()


async def test_one_message_carries_all_sequences_each_way(fake: Drafting) -> None:
    """They are drafted as one batch."""
    texts = [fake.peer.text([1]) for _ in range(3)]
    await fake.peer.send(exchange_pb2.JoinResponse(open=[message for _, message in texts]))
    for text, _ in texts:
        await text.read()
    rounds = [text.request([token]) for (text, _), token in zip(texts, (5, 6, 7), strict=True)]
    await fake.peer.send(exchange_pb2.JoinResponse(rounds=rounds, closed=[]))
    trees = [await text.read() for text, _ in texts]
    assert [list(tree.tree.tokens) for tree in trees] == [[5], [6], [7]]
    assert FakeDrafter.loaded[0].batches == [3]
    assert len(fake.peer.messages[-1].trees) == 3
    first, second, third = (text for text, _ in texts)
    await fake.peer.send(
        exchange_pb2.JoinResponse(closed=[first.number, third.number], rounds=[second.request([9])])
    )
    assert list((await second.read()).tree.tokens) == [9]


async def test_the_first_round_comes_with_its_sequence(fake: Drafting) -> None:
    text, message = fake.peer.text([1, 2])
    both = exchange_pb2.JoinResponse(open=[message], rounds=[text.request()])
    await fake.peer.send(both)
    assert isinstance(await text.read(), exchange_pb2.SequenceOpened)
    assert list((await text.read()).tree.tokens) == [2]


async def test_a_sequence_is_open_once_its_text_was_read(fake: Drafting) -> None:
    """Or at once, if a round waits for it."""
    await fake.open([1] * 30_000)
    (sequence,) = sequences()
    assert not sequence.pending
    text, message = fake.peer.text([1] * 30_000)
    await fake.peer.send(
        exchange_pb2.JoinResponse(open=[message], rounds=[text.request([7], timeout_us=1)])
    )
    assert isinstance(await text.read(), exchange_pb2.SequenceOpened)
    assert not (await text.read()).tree.tokens


async def test_texts_are_shared_within_an_owner_and_never_across(ngram: Drafting) -> None:
    await (await ngram.open([1, 2, 3, 4, 5], owner="mine")).end()
    for owner, expected in (("mine", [4, 5]), ("yours", []), ("", [])):
        text = await ngram.open([9, 1, 2, 3], owner=owner)
        assert list((await text.round()).tree.tokens) == expected


async def test_budgets_are_kept(ngram: Drafting) -> None:
    text = await ngram.open([*range(50), *range(20)])
    assert len((await text.round(node_budget=5)).tree.tokens) == 5
    assert len((await text.round(node_budget=5, max_depth=2)).tree.tokens) == 2
    assert len((await text.round(node_budget=200)).tree.tokens) == 32
    assert len((await text.round([20], node_budget=0)).tree.tokens) == 0
    assert len((await text.round(max_depth=0)).tree.tokens) == 0
    assert list((await text.round(node_budget=1)).tree.tokens) == [21]


async def test_a_round_after_its_deadline_gets_an_empty_tree(fake: Drafting) -> None:
    text = await fake.open([1])
    await text.round([2], committed_length=1)
    sequence = sequences()[0]
    assert sequence.updates[0].committed_length == 1
    assert sequence.threads == {"drafter"}
    sequence.stuck = True
    assert not (await text.round([4], timeout_us=20_000)).tree.tokens
    assert sequence.text == [1, 2, 4]
    sequence.stuck = False
    assert list((await text.round([5], timeout_us=60_000_000)).tree.tokens) == [5]


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": sampling_pb2.SamplingParams(**fields)}


async def test_what_cannot_be_drafted_for_is_refused() -> None:
    """Others go on. The fake verifier shares nothing."""
    cases: tuple[tuple[Sequence[int], dict[str, Any], str], ...] = (
        ([], {}, "EMPTY_TEXT"),
        ([1, VOCAB], {}, "TOKEN_OUT_OF_VOCABULARY"),
        ([1] * 5001, {}, "TEXT_TOO_LONG"),
        ([1, 2], {"prompt_length": 3}, "INVALID_PROMPT_LENGTH"),
        ([1, 2], sampling(temperature=-1), "INVALID_SAMPLING"),
        ([1, 2], sampling(logit_bias={VOCAB: 1.0}), "INVALID_SAMPLING"),
        ([1, 2], {"drafter": "nobody"}, "DRAFTER_NOT_FOUND"),
        ([1, 2], {"version": "99"}, "DRAFTER_NOT_FOUND"),
        ([1, 2], {"drafter": "x" * 300}, "NAME_TOO_LONG"),
        ([1, 2], {"drafter": "states"}, "HIDDEN_STATES_NOT_SHARED"),
        ([1, 2], {"drafter": "kv"}, "KV_NOT_SHARED"),
        ([1, 2], {"drafter": "kv", "read_grant": bytes(16)}, "KV_NOT_SHARED"),
    )
    specs = ("ngram", "kv=fake,kv=0", "states=fake,hidden=yes")
    async with drafting(*specs, max_context=5000) as service:
        for tokens, fields, reason in cases:
            other = await service.open([5, 6, 7, 8, 5, 6, 7])
            with pytest.raises(Refused) as error:
                await service.open(tokens, **fields)
            assert error.value.reason == reason
            assert list((await other.round()).tree.tokens)[:2] == [8, 5]


@pytest.mark.parametrize(
    ("name", "facts", "reason"),
    [
        ("made", {"target_fingerprint": "e" * 64}, "TARGET_MISMATCH"),
        ("made", {"target_fingerprint": ""}, "TARGET_MISMATCH"),
        ("made", {"tokenizer_digest": "b" * 64}, "TOKENIZER_MISMATCH"),
        ("made", {}, ""),
        ("sized", {"tokenizer_digest": "", "vocab_size": 777}, ""),
        ("sized", {"tokenizer_digest": "", "vocab_size": 778}, "TOKENIZER_MISMATCH"),
    ],
)
async def test_the_target_must_fit(name: str, facts: dict[str, Any], reason: str) -> None:
    """Without digests on both sides the vocabulary's size decides."""
    specs = (f"made=fake,target={TARGET},tokenizer={TOKENIZER}", "sized=fake,vocab=777")
    right = {"target_fingerprint": TARGET, "tokenizer_digest": TOKENIZER}
    async with drafting(*specs, target={**right, **facts}) as service:
        if not reason:
            await service.open([1], drafter=name)
            return
        with pytest.raises(Refused) as error:
            await service.open([1], drafter=name)
        assert error.value.reason == reason
        for value in facts.values():
            assert str(value) in str(error.value)


async def test_with_the_same_tokenizer_the_smaller_vocabulary_is_the_limit() -> None:
    target = {"vocab_size": 12, "tokenizer_digest": TOKENIZER}
    async with drafting(f"x=fake,tokenizer={TOKENIZER},vocab=10", target=target) as service:
        text = await service.open([9])
        with pytest.raises(Refused, match="TOKEN_OUT_OF_VOCABULARY"):
            await text.round([10])


async def test_an_invalid_round_ends_only_its_sequence() -> None:
    FakeDrafter.loaded.clear()
    async with drafting("x=fake", max_context=30) as service:
        other = await service.open([1, 2])
        for new, length, reason in (
            ([VOCAB], 3, "TOKEN_OUT_OF_VOCABULARY"),
            ([2**32 - 1], 3, "TOKEN_OUT_OF_VOCABULARY"),
            ([], 3, "OUT_OF_STEP"),
            ([], 0, "OUT_OF_STEP"),
            ([1] * 30, 32, "TEXT_TOO_LONG"),
        ):
            text = await service.open([1, 2])
            with pytest.raises(Refused) as error:
                await text.round(new, total_length=length)
            assert error.value.reason == reason
            assert list((await other.round([7])).tree.tokens) == [7]
            await service.peer.send(exchange_pb2.JoinResponse(rounds=[text.request()]))
            again = await service.open([1, 2])
            assert list((await again.round([8])).tree.tokens) == [8]
    await until_closed(11)


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_drafter_that_fails_ends_its_own_sequence_only(carrier: str) -> None:
    async with drafting("bad=failing", "ngram", carrier=carrier) as service:
        other = await service.open(TEXT, drafter="ngram")
        text = await service.open([1], drafter="bad")
        await text.round([2])
        with pytest.raises(Refused, match="RuntimeError: a drafter that fails") as error:
            await text.round([3])
        assert error.value.reason == "DRAFT_FAILED"
        await (await service.open([1], drafter="bad")).round([2])
        assert list((await other.round()).tree.tokens)[:2] == [8, 9]


async def test_the_number_of_sequences_is_limited() -> None:
    async with drafting("ngram", max_streams=2) as service:
        first = await service.open([1])
        await service.open([1])
        with pytest.raises(Refused, match="TOO_MANY_SEQUENCES"):
            await service.open([1])
        await first.peer.send(exchange_pb2.JoinResponse(closed=[first.number]))
        await service.open([1])


async def test_a_drain_lets_verifiers_close_their_sequences(fake: Drafting) -> None:
    text = await fake.open([1])
    fake.peer.closes = False
    drain = asyncio.create_task(fake.service.drain())
    await until(lambda: not fake.peer.lists[-1].drafters)
    with pytest.raises(Refused, match="DRAINING"):
        await fake.open([1])
    assert list((await text.round([7])).tree.tokens) == [7]
    assert not drain.done()
    await text.end()
    await drain
    await until_closed(1)


async def test_after_a_lost_connection_the_service_joins_again(fake: Drafting) -> None:
    in_a_round, idle = await fake.open([1]), await fake.open([1])
    drafter = FakeDrafter.loaded[0]
    drafter.hold.clear()
    await fake.peer.send(exchange_pb2.JoinResponse(rounds=[in_a_round.request([2])]))
    await asyncio.to_thread(drafter.holding.wait)
    fake.peer.leave.set()
    with pytest.raises(ConnectionError):
        await idle.read()
    drafter.hold.set()
    await until_closed(2)
    again = await fake.verifier.peer(2)
    assert again.carrier == fake.peer.carrier
    text = await again.open([1, 2])
    assert list((await text.round([3])).tree.tokens) == [3]


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_close_of_what_is_not_open_is_ignored(carrier: str) -> None:
    """Also of what the same message opens: then it is not open after it."""
    async with drafting("ngram", carrier=carrier) as service:
        _, both = service.peer.text([1])
        await service.peer.send(exchange_pb2.JoinResponse(closed=[1, 7, 2**63], open=[both]))
        text = await service.open(TEXT)
        assert list((await text.round()).tree.tokens)[:2] == [8, 9]
        assert len(service.verifier.peers) == 1, "the connection goes on"


OPEN = exchange_pb2.OpenSequence(sequence=1, tokens=[1], prompt_length=1)
ROUND = exchange_pb2.DraftRound(sequence=1, round=1, node_budget=4, max_depth=4, total_length=1)


MESSAGES: list[dict[str, Any]] = [
    {"rounds": [exchange_pb2.DraftRound(sequence=7)]},
    {"rounds": [exchange_pb2.DraftRound()]},
    {"open": [OPEN, OPEN]},
    {"open": [exchange_pb2.OpenSequence(tokens=[1])]},
    {"open": [OPEN], "rounds": [ROUND, ROUND]},
]
FRAMES = [(b"\xff" * 9, None), (b"", 2**32 - 1), (b"", (64 << 20) + 1)]  # with another length


@pytest.mark.parametrize(
    ("carrier", "sent"),
    [*product(CARRIERS, MESSAGES), *(("socket", frame) for frame in FRAMES)],
)
async def test_a_verifier_that_breaks_the_protocol_is_disconnected(carrier: str, sent: Any) -> None:
    async with drafting("ngram", carrier=carrier) as service:
        if isinstance(sent, dict):
            await service.peer.send(exchange_pb2.JoinResponse(**sent))
        else:
            await service.peer.send_frame(*sent)
        await service.peer.ended.wait()
        await serves_again(service)


async def serves_again(service: Drafting) -> None:
    """The next connection is made, and drafted for."""
    text = await (await service.verifier.peer(2)).open(TEXT)
    assert list((await text.round()).tree.tokens)[:2] == [8, 9]


numbers = st.integers(0, 5)
messages = st.builds(
    exchange_pb2.JoinResponse,
    closed=st.lists(numbers, max_size=2),
    open=st.lists(
        st.builds(
            exchange_pb2.OpenSequence,
            sequence=numbers,
            tokens=st.lists(st.integers(0, VOCAB), max_size=4),
            prompt_length=st.integers(0, 4),
            drafter=st.sampled_from(["", "ngram", "x"]),
        ),
        max_size=3,
    ),
    rounds=st.lists(
        st.builds(
            exchange_pb2.DraftRound,
            sequence=numbers,
            round=numbers,
            new_tokens=st.lists(st.integers(0, VOCAB), max_size=3),
            node_budget=st.integers(0, 2**32 - 1),
            max_depth=st.integers(0, 2**32 - 1),
            timeout_us=st.integers(0, 2**64 - 1),
            total_length=st.integers(0, 8),
        ),
        max_size=3,
    ),
)


@settings(max_examples=25)
@given(st.sampled_from(CARRIERS), st.lists(messages, max_size=6))
def test_no_message_harms_the_service(carrier: str, sent: list[exchange_pb2.JoinResponse]) -> None:
    async def run() -> None:
        async with drafting("ngram", carrier=carrier) as service:
            peer = service.peer
            peer.receive = lambda message: None  # type: ignore[method-assign]
            for message in sent:
                await peer.send(message)
            peer.leave.set()
            await serves_again(service)
            listed = await service.registry.ListDrafters(drafter_pb2.ListDraftersRequest())
            assert listed.drafters[0].active_streams == 1

    asyncio.run(run())


async def test_metrics_count_rounds_sequences_and_links() -> None:
    metrics = CollectorRegistry()
    of = {"drafter": "ngram", "version": "1", "method": "ngram"}

    def value(name: str, labels: dict[str, str]) -> float | None:
        return metrics.get_sample_value(f"specdec_drafter_{name}", labels)

    async with drafting("ngram", metrics=metrics) as service:
        text = await service.open(TEXT)
        for _ in range(3):
            await text.round()
        await until(lambda: value("rounds_total", of) == 3)
        assert value("streams", of) == 1
        assert value("links", {"carrier": "socket"}) == 1
        assert value("links", {"carrier": "stream"}) == 0
        await text.end()
        assert value("streams", of) == 0


def test_nothing_loads_torch_before_a_method_needs_it() -> None:
    found = packages_after(
        "from paceline.drafter.service import DrafterSpec, build_service\n"
        "import paceline.drafter.methods.ngram\n"
        "build_service([DrafterSpec.parse('ngram')])"
    )
    assert not found & {"torch", "transformers"}
