"""The drafting thread: batches, backlogs, failures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.drafter.methods.base import Budget, Generation, Update
from paceline.drafter.worker import SLICE, DraftWorker

from .conftest import until
from .fakes import FakeDrafter, FakeSequence

BUDGET = Budget(8, 8)


@pytest.fixture
async def worker() -> AsyncIterator[DraftWorker]:
    made = DraftWorker()
    made.start()
    yield made
    made.stop()


def started(drafter: FakeDrafter, tokens: int = 3) -> FakeSequence:
    sequence = drafter.start(Generation([1] * 3, 3, 100))
    sequence.pending = tokens
    return sequence


async def idle(worker: DraftWorker) -> None:
    """Until everything posted before has run."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def tell() -> None:
        loop.call_soon_threadsafe(done.set)

    worker.post(tell)
    await done.wait()


async def queued(worker: DraftWorker, drafter: FakeDrafter, *tokens: int) -> list[Any]:
    """Results of one round for each token; all but the first wait together."""
    sequences = [started(drafter) for _ in tokens]
    drafter.hold.clear()
    rounds = []
    for sequence, token in zip(sequences, tokens, strict=True):
        rounds.append(worker.submit(drafter, sequence, Update([token]), BUDGET))
        await asyncio.to_thread(drafter.holding.wait)
    drafter.hold.set()
    return await asyncio.gather(*rounds, return_exceptions=True)


async def test_queued_rounds_are_drafted_as_a_batch(worker: DraftWorker) -> None:
    drafter = FakeDrafter()
    drafted = await queued(worker, drafter, 5, 6, 7, 8)
    assert drafter.batches == [1, 3]
    assert [d.tree.tokens for d in drafted] == [(5,), (6,), (7,), (8,)]
    assert all(sequence.threads == {"drafter"} for sequence in drafter.sequences)


async def test_a_long_backlog_does_not_block_other_rounds(worker: DraftWorker) -> None:
    long, short = FakeDrafter(), FakeDrafter()
    prompt = started(long, tokens=SLICE * 20)
    waiting = worker.submit(long, prompt, Update([5]), BUDGET)
    await until(lambda: ("warm", SLICE) in long.journal)
    assert (await worker.submit(short, started(short), Update([6]), BUDGET)).tree.tokens == (6,)
    assert (await waiting).tree.tokens == (5,)
    warmed = [tokens for what, tokens in long.journal if what == "warm"]
    assert set(warmed) == {SLICE}
    assert sum(warmed) >= SLICE * 19


async def test_a_backlog_is_processed_without_a_round(worker: DraftWorker) -> None:
    drafter = FakeDrafter()
    sequence = started(drafter, tokens=SLICE * 2 + 1)
    worker.catch_up(sequence)
    await until(lambda: not sequence.backlog)
    assert drafter.journal == [("warm", SLICE), ("warm", SLICE), ("warm", 1)]


async def test_without_nodes_the_tokens_are_appended(worker: DraftWorker) -> None:
    drafter = FakeDrafter()
    sequence = started(drafter)
    drafted = await worker.submit(drafter, sequence, Update([4]), Budget(0, 8))
    assert not drafted.tree
    assert sequence.text == [1, 1, 1, 4]
    assert drafter.batches == []


async def test_only_the_failing_round_of_a_batch_fails(worker: DraftWorker) -> None:
    drafter = FakeDrafter()
    drafter.poison = 13
    _, six, poisoned, seven = await queued(worker, drafter, 5, 6, 13, 7)
    assert six.tree.tokens == (6,)
    assert seven.tree.tokens == (7,)
    assert isinstance(poisoned, RuntimeError)
    again = await worker.submit(drafter, drafter.sequences[1], Update([8]), BUDGET)
    assert again.tree.tokens == (8,)


async def test_a_closed_sequence_is_not_processed(worker: DraftWorker) -> None:
    drafter = FakeDrafter()
    sequence = started(drafter, tokens=10**9)
    worker.catch_up(sequence)
    waiting = worker.submit(drafter, sequence, Update([5]), Budget(8, 8, math.inf))
    worker.close(sequence)
    await idle(worker)
    await idle(worker)
    warmed = len(drafter.journal)
    for _ in range(3):
        await idle(worker)
    assert len(drafter.journal) == warmed
    assert sequence.closed == 1
    waiting.cancel()


async def test_stopping_runs_posted_calls(worker: DraftWorker) -> None:
    sequence = started(FakeDrafter())
    worker.close(sequence)
    worker.stop()
    assert sequence.closed == 1
