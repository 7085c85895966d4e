"""The drafting thread: batches, backlogs, failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from calls import until
from fakes.drafter import FakeDrafter

from paceline.device import Device, DeviceLost
from paceline.drafter import worker as worker_module
from paceline.drafter.methods.base import Budget, Drafter, GenerationInfo, Update
from paceline.drafter.session import Drafted, Session
from paceline.drafter.worker import SLICE, DraftWorker, Job

BUDGET = Budget(8, 8)


@contextmanager
def started_worker(*, overlap: bool | None = False) -> Iterator[DraftWorker]:
    """A worker that runs for the body."""
    worker = DraftWorker(overlap=overlap)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[DraftWorker]:
    """Of whose slices none takes too long."""
    monkeypatch.setattr(worker_module, "SLICE_SECONDS", float("inf"))
    with started_worker() as made:
        yield made


def drafting(drafter: Drafter, backlog: int | None = None) -> Session:
    """A new sequence; of a fake, with a backlog."""
    session = Session(drafter, GenerationInfo([1] * 3, 3, 100))
    if backlog is not None:
        session.sequence.pending = backlog  # type: ignore[attr-defined]
    return session


def submit(
    worker: DraftWorker, rounds: list[tuple[Session, int]], budget: Budget = BUDGET
) -> list[asyncio.Future[Drafted]]:
    """Queue a round of one token for each sequence, as one message does; the results."""
    loop = asyncio.get_running_loop()
    results: list[asyncio.Future[Drafted]] = [loop.create_future() for _ in rounds]

    def finish(result: asyncio.Future[Drafted], outcome: Drafted | Exception) -> None:
        if isinstance(outcome, Exception):
            result.set_exception(outcome)
        else:
            result.set_result(outcome)

    def queue() -> None:
        for (session, token), result in zip(rounds, results, strict=True):

            def answer(
                outcome: Drafted | Exception, result: asyncio.Future[Drafted] = result
            ) -> None:
                loop.call_soon_threadsafe(finish, result, outcome)

            worker.submit(Job(session, Update([token]), budget, time.monotonic(), answer))

    worker.post(queue)
    return results


async def round_of(
    worker: DraftWorker, session: Session, token: int, budget: Budget = BUDGET
) -> Drafted:
    """The result of one round."""
    (result,) = submit(worker, [(session, token)], budget)
    return await result


async def test_a_long_backlog_does_not_block_other_rounds(worker: DraftWorker) -> None:
    long, short = FakeDrafter(), FakeDrafter()
    (waiting,) = submit(worker, [(drafting(long, SLICE * 20), 5)])
    await until(lambda: ("warm", SLICE) in long.journal)
    assert (await round_of(worker, drafting(short), 6)).tree.tokens == (6,)
    assert (await waiting).tree.tokens == (5,)
    warmed = [tokens for what, tokens in long.journal if what == "warm"]
    assert set(warmed) == {SLICE}
    assert sum(warmed) >= SLICE * 19


async def test_only_the_failing_round_of_a_batch_fails(worker: DraftWorker) -> None:
    drafter = FakeDrafter()
    drafter.poison = 13
    sessions = [drafting(drafter) for _ in range(3)]
    rounds = submit(worker, list(zip(sessions, (6, 13, 7), strict=True)))
    six, poisoned, seven = await asyncio.gather(*rounds, return_exceptions=True)
    assert isinstance(six, Drafted)
    assert isinstance(seven, Drafted)
    assert (six.tree.tokens, seven.tree.tokens) == ((6,), (7,))
    assert isinstance(poisoned, RuntimeError)
    assert (await round_of(worker, sessions[0], 8)).tree.tokens == (8,)


async def test_a_closed_sequence_is_not_processed(worker: DraftWorker) -> None:
    drafter = FakeDrafter()
    session = drafting(drafter, 10**9)
    (waiting,) = submit(worker, [(session, 5)])
    await until(lambda: bool(drafter.journal))
    await worker.run(lambda: worker.close(session))
    warmed = len(drafter.journal)
    for _ in range(3):
        await worker.run(lambda: None)
    assert len(drafter.journal) == warmed
    assert drafter.sequences[0].closed == 1
    assert not waiting.done()


async def test_a_failure_that_lasts_ends_the_service() -> None:
    """One round may fail without it; after each failure the device is asked."""
    lost: list[DeviceLost] = []

    class Failing(Device):
        def lost(self) -> DeviceLost | None:
            return lost[0] if lost else None

    worker = DraftWorker(Failing())
    worker.start()
    try:
        drafter = FakeDrafter()
        drafter.poison = 13
        session = drafting(drafter)
        lasting = asyncio.create_task(worker.lost())
        for _ in range(2):
            with pytest.raises(RuntimeError):
                await round_of(worker, session, 13)
            assert (await round_of(worker, session, 6)).tree.tokens == (6,)
            assert not lasting.done()
        lost.append(DeviceLost("the GPU fails every call"))
        with pytest.raises(RuntimeError):
            await round_of(worker, session, 13)
        with pytest.raises(DeviceLost, match="fails every call"):
            await lasting
    finally:
        worker.stop()
