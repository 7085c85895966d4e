"""Drafting ahead while the verifier works changes when nodes are drafted, not which."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from calls import until
from fakes.drafter import FakeDrafter, FakeSequence

from paceline.drafter.methods.base import Budget, Update

from .models import SAMPLINGS, VOCAB, load, recorded_kv, start, text_of, write_model
from .test_selfspec import load as load_selfspec
from .test_selfspec import sparse_text
from .test_worker import drafting, round_of, started_worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ahead") / "model", "llama", 3)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_trees_are_those_of_a_drafter_that_waits(folder: Path, name: str) -> None:
    draw = random.Random(name)
    drafter = load("lm", folder, widths="1", depth="4", min_survival="0.05")
    text = text_of(40, 1)
    ahead, waiting = (
        start(drafter, text, sampling=SAMPLINGS[name]),
        start(drafter, text, sampling=SAMPLINGS[name]),
    )
    kept = 0
    for _ in range(30):
        budget = Budget(draw.randint(1, 6), draw.randint(1, 6))
        tree = ahead.draft(budget)
        assert tree == waiting.draft(budget)
        levels = draw.randint(0, 12)
        for _ in range(levels):
            drafter.draft_ahead([ahead])
        # Accepted as a whole, with the token drafted ahead, or the verifier differs somewhere.
        drafted = [node.token for node in ahead.chain[: len(tree) + 1]]
        if draw.random() < 0.4:
            drafted[draw.randrange(len(drafted))] = draw.randrange(VOCAB)
        for sequence in (ahead, waiting):
            sequence.extend(Update(drafted))
        kept += bool(ahead.chain)
    assert kept > 3


def test_selfspec_continues_its_own_text(folder: Path) -> None:
    text = text_of(60, 4)
    drafter = load_selfspec(folder, context=12, depth=5, min_survival=0)
    expected = sparse_text(folder, text, len(text) - 1, 12, 11)
    sequence = start(drafter, text, recorded_kv(drafter.decoder, text, len(text) - 1))
    assert list(sequence.draft(Budget(5, 5)).tokens) == expected[:5]
    for _ in range(3):
        drafter.draft_ahead([sequence])
    sequence.extend(Update(expected[:6]))
    # The KV of the round before is kept: the rest of one chain under the same budget.
    assert list(sequence.draft(Budget(5, 5)).tokens) == expected[6:11]
    sequence.close()


class _Ahead(FakeDrafter):
    """Drafts ahead for ever."""

    def draft_ahead(self, sequences: object) -> list[FakeSequence]:
        self.journal.append(("ahead", 0))
        assert all(not each.closed for each in self.sequences)
        return self.sequences


@pytest.mark.parametrize(
    ("overlap", "apart", "expected"),
    [(True, False, True), (False, True, False), (None, True, True), (None, False, False)],
)
async def test_the_worker_drafts_ahead_between_rounds_where_it_has_cores_of_its_own(
    overlap: bool | None, apart: bool, expected: bool
) -> None:
    with started_worker(overlap=overlap) as worker:
        drafter = _Ahead()
        session = drafting(drafter)
        session.apart = apart
        for token in (5, 6):
            drafter.journal.clear()
            drafted = await round_of(worker, session, token)
            assert drafted.tree.tokens == (token,)
            if expected:
                await until(lambda: drafter.journal.count(("ahead", 0)) > 2)
        await worker.run(lambda: worker.close(session))
    assert (("ahead", 0) in drafter.journal) == expected
    assert drafter.sequences[0].closed == 1
