"""Prompts of other texts do not hold rounds up."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verifier_support import text

from paceline.convert import load_decoder
from paceline.decoder import Decoder
from paceline.decoder.graphs import SHAPES
from paceline.text import Text
from paceline.tree import EMPTY
from paceline.verifier.engine.batch import MIN_GRAPH_PROMPT, prompt_room
from paceline.verifier.engine.drafted import StepOutput
from paceline.verifier.engine.job import CachedSequence, Decode, Request
from paceline.verifier.kv.base import KvLayout
from paceline.verifier.kv.pool import PagePool
from paceline.verifier.scheduler.costs import CostTable
from paceline.verifier.scheduler.scheduler import MAX_GAP, MIN_PROMPT, Scheduler


@pytest.mark.parametrize("rounds", [*range(0, SHAPES[-1] + 1, 7), 2000])
def test_a_step_of_rounds_and_prompts_is_one_of_a_graph(rounds: int) -> None:
    room = prompt_room(rounds)
    assert room >= MIN_GRAPH_PROMPT
    assert rounds + room <= SHAPES[-1] or room == MIN_GRAPH_PROMPT


@pytest.fixture(scope="module")
def decoder(model: Path) -> Decoder:
    return load_decoder(model)


@pytest.fixture
def pool(decoder: Decoder) -> Iterator[PagePool]:
    made = PagePool(
        KvLayout.of(decoder.config), torch.device("cpu"), kv_bytes=1 << 26, max_sequences=4,
        max_context=2048,
    )  # fmt: skip
    yield made
    made.close()


def sequence(pool: PagePool, length: int) -> CachedSequence:
    params = Request(Text(tuple(text(length, length)), limit=2000))
    return CachedSequence(params, pool.allocate(2048, None))


TABLE = CostTable((1, 16, 64, 128), (0.02, 0.03, 0.09, 0.18), per_attended=2e-7)
"""Of a processor: some more rows cost little, and many cost in proportion."""


@given(
    streams=st.integers(1, 40),
    drafted=st.integers(0, 200),
    begins=st.integers(0, 8000),
    passed=st.floats(0, 1),
)
def test_pieces_of_prompts_leave_a_step_as_long_as_a_few_plain_ones(
    streams: int, drafted: int, begins: int, passed: float
) -> None:
    """Beside any load prompts go on, and alone in at least half of that time."""
    now = [100.0]
    scheduler = Scheduler(TABLE, 16, clock=lambda: now[0])
    now[0] += passed
    rounds = streams + drafted
    room = scheduler.prompt_tokens(streams, rounds, begins, 512)
    plain = scheduler.costs.plain_seconds(streams, streams, 1)
    beside = scheduler.costs.plain_seconds(streams, rounds, 1)

    def added(tokens: int) -> float:
        before = scheduler.costs.plain_seconds(1, rounds, begins)
        return scheduler.costs.plain_seconds(1, rounds + tokens, begins) - before

    limit = max(MAX_GAP * plain - passed, beside + MAX_GAP / 2 * plain)
    assert room == MIN_PROMPT or beside + added(room) <= limit
    assert room == 512 or beside + added(room + 1) > limit


def test_a_step_with_prompts_that_takes_longer_than_said_makes_the_next_pieces_smaller(
    decoder: Decoder, pool: PagePool
) -> None:
    """For what the table does not know, such as scores of prompts. Where all steps take longer,
    because others keep the machine busy, prompts are not left behind."""
    now = [100.0]
    scheduler = Scheduler(TABLE, 16, clock=lambda: now[0])
    job = Decode(sequence(pool, 5), credits=1)

    def run(prompt: int, slower: float) -> int:
        """Runs a step; returns the room of the next one."""
        scheduler.admit([job], [EMPTY], 1 + prompt, 5 + prompt, 0)
        began = now[0]
        now[0] += slower * scheduler.costs.plain_seconds(1, 1 + prompt, 1)
        scheduler.stepped(began, now[0], [StepOutput([1])])
        return scheduler.prompt_tokens(1, 1, 0, 512)

    for _ in range(40):
        usual = run(0, 1.0)
    sizes = [run(usual, 5.0) for _ in range(10)]
    assert sizes == sorted(sizes, reverse=True)
    assert usual / 2 < sizes[-1] < usual / 1.3
    assert max(run(usual, 1.0) for _ in range(20)) > 0.9 * usual
    job.sequence.kv.close()
