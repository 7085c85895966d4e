"""The Draft stream, through a real server on a unix socket."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from paceline.v1 import drafter_pb2

from .conftest import VOCAB, Drafting, Stream, drafting, failure, until
from .fakes import FakeDrafter

TEXT = [5, 6, 7, 8, 9, 10, 11, 1, 2, 5, 6, 7]
CODE = grpc.StatusCode
ATTACH = {"tokens": [1, 2], "vocab_size": VOCAB, "prompt_length": 2}


@pytest.fixture
async def fakes() -> AsyncIterator[Drafting]:
    FakeDrafter.loaded.clear()
    async with drafting("threaded=fake", "inline=inline-fake") as service:
        yield service


async def until_closed(count: int) -> None:
    """Until every sequence of every fake is closed."""

    def closed() -> bool:
        sequences = [s for drafter in FakeDrafter.loaded for s in drafter.sequences]
        assert all(sequence.closed <= 1 for sequence in sequences)
        return len(sequences) == count and all(sequence.closed for sequence in sequences)

    await until(closed)


async def test_a_round_is_answered(ngram: Drafting) -> None:
    stream = await ngram.attach(TEXT)
    attached = stream.attached
    assert (attached.drafter, attached.version, attached.method) == ("ngram", "1", "ngram")
    assert attached.max_nodes == 32
    tree = await stream.round()
    assert list(tree.tree.tokens)[:4] == [8, 9, 10, 11]
    assert (tree.round_id, tree.version) == (1, "1")
    assert not (await stream.round(range(100, 900))).tree.tokens, "more than one slice"
    tree = await stream.round([*range(500, 510), 3, 3, 3, 500, 501, 502])
    assert list(tree.tree.tokens)[:3] == [503, 504, 505]
    await stream.end()


async def test_texts_are_shared_within_an_owner_and_never_across(ngram: Drafting) -> None:
    await (await ngram.attach([1, 2, 3, 4, 5], token="mine")).end()
    for token, expected in (("mine", [4, 5]), ("yours", []), ("", [])):
        stream = await ngram.attach([9, 1, 2, 3], token=token)
        assert list((await stream.round()).tree.tokens) == expected
        stream.call.cancel()


async def test_budgets_are_kept(ngram: Drafting) -> None:
    stream = await ngram.attach([*range(50), *range(20)])
    assert len((await stream.round(node_budget=5)).tree.tokens) == 5
    assert len((await stream.round(node_budget=5, max_depth=2)).tree.tokens) == 2
    assert len((await stream.round(node_budget=200)).tree.tokens) == 32
    assert len((await stream.round([20], node_budget=0)).tree.tokens) == 0
    assert list((await stream.round(node_budget=1)).tree.tokens) == [21]
    await stream.end()


@pytest.mark.parametrize("name", ["threaded", "inline"])
async def test_a_round_after_its_deadline_gets_an_empty_tree(fakes: Drafting, name: str) -> None:
    stream = await fakes.attach([1], drafter=name)
    await stream.round([2])  # after it the prompt is processed
    sequence = FakeDrafter.loaded[name == "inline"].sequences[0]
    sequence.stuck = True
    assert not (await stream.round([4], deadline_ms=20)).tree.tokens
    assert sequence.text == [1, 2, 4]
    sequence.stuck = False
    assert list((await stream.round([5], deadline_ms=60_000)).tree.tokens) == [5]
    await stream.end()


async def test_updates_reach_a_method_on_its_thread(fakes: Drafting) -> None:
    for name in ("threaded", "inline"):
        stream = await fakes.attach(list(range(300)), drafter=name)
        await stream.round([3], committed_length=2)
        await stream.end()
    await until_closed(2)
    threaded, inline = (drafter.sequences[0] for drafter in FakeDrafter.loaded)
    assert threaded.threads == {"drafter"}
    assert inline.threads == {"MainThread"}
    for sequence in (threaded, inline):
        (update,) = sequence.updates
        assert (update.tokens, update.committed_length) == ((3,), 2)


@pytest.mark.parametrize(
    ("request_fields", "code", "reason"),
    [
        ({"new_tokens": [VOCAB]}, CODE.INVALID_ARGUMENT, "TOKEN_OUT_OF_VOCABULARY"),
        ({"new_tokens": [2**32 - 1]}, CODE.INVALID_ARGUMENT, "TOKEN_OUT_OF_VOCABULARY"),
        ({"total_length": 3}, CODE.FAILED_PRECONDITION, "OUT_OF_STEP"),
        ({"total_length": 0}, CODE.FAILED_PRECONDITION, "OUT_OF_STEP"),
        ({"new_tokens": [1] * 30, "total_length": 32}, CODE.INVALID_ARGUMENT, "TEXT_TOO_LONG"),
    ],
)
async def test_an_invalid_round_ends_only_its_stream(
    request_fields: dict[str, Any], code: grpc.StatusCode, reason: str
) -> None:
    FakeDrafter.loaded.clear()
    async with drafting("x=fake", max_context=30) as service:
        other, stream = await service.attach([1, 2]), await service.attach([1, 2])
        fields = {"new_tokens": [], "total_length": 2 + len(request_fields.get("new_tokens", ()))}
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.round((), **{**fields, **request_fields})
        assert failure(error) == (code, reason)
        assert list((await other.round([7])).tree.tokens) == [7]
        again = await service.attach([1, 2])
        assert list((await again.round([8])).tree.tokens) == [8]
        await other.end()
        await again.end()
        await until_closed(3)


async def test_messages_must_come_in_order(ngram: Drafting) -> None:
    attach = drafter_pb2.DraftRequest(attach=drafter_pb2.DraftAttach(**ATTACH))
    round_ = drafter_pb2.DraftRequest(round=drafter_pb2.DraftRound())
    for stream, request, reason in (
        (Stream(ngram.drafter.Draft(), 0), drafter_pb2.DraftRequest(), "NOT_ATTACHED"),
        (Stream(ngram.drafter.Draft(), 0), round_, "NOT_ATTACHED"),
        (await ngram.attach(TEXT), attach, "ALREADY_ATTACHED"),
    ):
        await stream.send(request)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.read()
        assert failure(error) == (CODE.INVALID_ARGUMENT, reason)
    await Stream(ngram.drafter.Draft(), 0).end()


@pytest.mark.parametrize("name", ["threaded", "inline"])
async def test_memory_is_freed_however_a_stream_ends(fakes: Drafting, name: str) -> None:
    drafter = FakeDrafter.loaded[name == "inline"]
    well, cancelled, wrong = [await fakes.attach([1], drafter=name) for _ in range(3)]
    await well.round([2])
    await well.end()
    await cancelled.round([2])
    cancelled.call.cancel()
    with pytest.raises(grpc.aio.AioRpcError):
        await wrong.round([VOCAB])
    await until_closed(3)
    if name == "threaded":
        in_a_round = await fakes.attach([1], drafter=name)
        drafter.hold.clear()
        drafter.holding.clear()
        waiting = asyncio.create_task(in_a_round.round([2]))
        await asyncio.to_thread(drafter.holding.wait)
        in_a_round.call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        drafter.hold.set()
        await until_closed(4)
    async with grpc.aio.insecure_channel(str(fakes.address)) as channel:
        gone = Drafting(fakes.address, channel)
        await (await gone.attach([1], drafter=name)).round([2])
    await until_closed(len([s for d in FakeDrafter.loaded for s in d.sequences]))
    listed = await fakes.registry.ListDrafters(drafter_pb2.ListDraftersRequest())
    assert [each.active_streams for each in listed.drafters] == [0, 0]


async def test_a_drafter_that_fails_ends_its_own_stream_only() -> None:
    async with drafting("bad=failing", "worse=failing-thread", "ngram") as service:
        other = await service.attach(TEXT, drafter="ngram")
        for name in ("bad", "worse"):
            stream = await service.attach([1], drafter=name)
            await stream.round([2])
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stream.round([3])
            assert failure(error) == (CODE.INTERNAL, "INTERNAL_ERROR")
            assert "fails" not in str(error.value.details())
            await (await service.attach([1], drafter=name)).round([2])
        assert list((await other.round()).tree.tokens)[:2] == [8, 9]


async def test_the_number_of_streams_is_limited() -> None:
    async with drafting("ngram", max_streams=2) as service:
        first, second = await service.attach([1]), await service.attach([1])
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await service.attach([1])
        assert failure(error) == (CODE.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS")
        await first.end()
        await (await service.attach([1])).end()
        await second.end()


async def test_a_drain_lets_generations_finish() -> None:
    async with drafting("ngram", drain_seconds=60) as service:
        stream = await service.attach(TEXT)
        service.stop.set()

        async def attach() -> None:
            while True:  # until the service drains
                await (await service.attach([1])).end()

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await attach()
        assert failure(error) == (CODE.UNAVAILABLE, "DRAINING")
        assert list((await stream.round()).tree.tokens)[:2] == [8, 9]
        await stream.end()


def test_nothing_loads_torch_before_a_method_needs_it() -> None:
    code = (
        "import sys; from paceline.drafter import build_service, DrafterSpec; "
        "import paceline.drafter.methods.ngram, paceline.drafter.methods.replay; "
        "build_service([DrafterSpec.parse('ngram')]); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
