"""The scheduler: no token depends on it, prompts do not hold rounds up, and what steps cost."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest.mock import Mock

import drafters
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verifier_support import PROMPT, Client, Serve, text

from paceline.convert import load_decoder
from paceline.device import SHAPES
from paceline.kernels import SamplingRules
from paceline.text import Text
from paceline.tree import EMPTY, TokenTree
from paceline.v1 import sampling_pb2, verifier_pb2
from paceline.verifier.engine.batch import MIN_GRAPH_PROMPT, prompt_room
from paceline.verifier.engine.drafted import DraftedText
from paceline.verifier.engine.report import StepOutput
from paceline.verifier.scheduler.costs import Costs, CostTable, flat_table, profile
from paceline.verifier.scheduler.scheduler import (
    MAX_GAP,
    MIN_PROMPT,
    Scheduler,
    load_scheduler,
    save_scheduler,
)

STEEP = CostTable((1, 2), (1.0, 2.0))
"""A step takes a second a token."""
FLAT = CostTable((1, 512), (1.0, 1.0))
"""A step takes a second."""


async def served_with(client: Client, costs: CostTable) -> None:
    """Let a verifier decide by these costs from now on."""
    scheduler = Scheduler(costs, 255)
    await client.service.engine.between_steps(
        lambda: setattr(client.service.engine, "_scheduler", scheduler)
    )


@pytest.mark.parametrize("costs", [STEEP, FLAT])
async def test_tokens_are_the_same_whatever_is_cut(serve: Serve, costs: CostTable) -> None:
    """Every kind of tree, several sequences at once, all nodes checked and hardly any."""

    def fields(seed: int) -> dict[str, Any]:
        sampling = sampling_pb2.SamplingParams(temperature=seed % 2, seed=seed)
        return {"sampling": sampling, "max_new_tokens": 30, "ignore_eos": True}

    async with serve() as client:
        plain = [await client.generate(PROMPT, None, **fields(seed)) for seed in range(6)]
        await served_with(client, costs)
        draws = [drafters.all_of(text, len(PROMPT))["mixed"] for text in plain]
        scheduled = await asyncio.gather(
            *(client.generate(PROMPT, draws[seed], seed=seed, **fields(seed)) for seed in range(6))
        )
    assert scheduled == plain


async def drafted(client: Client, tree: TokenTree, count: int = 1) -> list[Any]:
    """Responses of steps that are each drafted with the same tree."""
    name = await client.drafter_service.add(lambda *_: tree)
    created = await client.create(PROMPT, max_new_tokens=count + 9, ignore_eos=True)
    responses = await client.steps(created.handle, count, drafter=name)
    await client.release(created.handle)
    return responses


async def test_unlikely_nodes_are_left_out_where_steps_cost(client: Client) -> None:
    """The first chain is worth a token more, the second is not, and says so."""
    tree = TokenTree((9, 8, 7, 6), (-1, 0, -1, 2), (0.01, 0.5, 0.9, 0.01))
    await served_with(client, FLAT)
    (answer,) = await drafted(client, tree)
    assert (answer.checked_nodes, answer.batch_tokens) == (4, 5)
    await served_with(client, STEEP)
    (answer,) = await drafted(client, tree)
    assert answer.checked_nodes == 0
    assert answer.batch_tokens == 1


@pytest.mark.parametrize("part", ["admit", "stepped"])
async def test_a_scheduler_that_fails_costs_no_step(
    part: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served_with(client, FLAT)
    monkeypatch.setattr(Scheduler, part, lambda *_: 1 / 0)
    tree = TokenTree.chain([9, 8])
    answers = await drafted(client, tree, 2)
    assert [answer.checked_nodes for answer in answers] == [2, 2]
    assert [answer.node_budget for answer in answers] == [255, 255]


async def test_drafting_begins_when_plain_steps_are_measured(client: Client) -> None:
    """And never without a drafter."""
    await served_with(client, FLAT)
    name = await client.drafter_service.add(lambda *_: TokenTree.chain([9, 8]))
    for drafter in (name, "none"):
        created = await client.create(PROMPT, max_new_tokens=99, ignore_eos=True)
        stream = client.stream(created.handle, drafter=drafter, always_draft=False)
        responses = [each async for each in stream]
        reasons = {each.no_draft for each in responses}
        if drafter == "none":
            assert reasons == {verifier_pb2.NO_DRAFT_REASON_NO_DRAFTER}
        else:
            assert responses[0].no_draft == verifier_pb2.NO_DRAFT_REASON_NODE_BUDGET
            before = takewhile(lambda each: not each.tree.tokens, responses)
            assert sum(each.steps for each in before) >= 15
            assert any(each.node_budget for each in responses)


def drawn(confidences: list[float], costs: CostTable) -> list[int]:
    """Nodes checked of a chain of samples, with these confidences."""
    sampling = SamplingRules(temperature=1.0, rejection=True)
    job = DraftedText(Text([0], sampling=sampling))
    count = len(confidences)
    tree = TokenTree.chain([1] * count, confidences)
    (cut,) = Scheduler(costs, 255).admit([job], [tree], 1, 9, 0)
    return list(cut.tokens)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.data())
def test_whether_a_sample_is_checked_says_nothing_about_it(
    confidences: list[float], data: st.DataObject
) -> None:
    """Appendix A: no confidence behind it counts, which depends on what was drawn; its own does."""
    steps = (1.0, 1.2, 1.4, 1.5, 1.9)
    costs = CostTable((1, 2, 3, 4, 8), steps)
    node = data.draw(st.integers(0, len(confidences) - 1))
    others = data.draw(st.lists(st.floats(0, 1), min_size=6, max_size=6))
    changed = [*confidences[: node + 1], *others[node + 1 : len(confidences)]]
    assert (len(drawn(confidences, costs)) > node) == (len(drawn(changed, costs)) > node)
    assert [len(drawn([each], costs)) for each in (0.1, 0.9)] == [0, 1]


def test_a_step_of_rounds_and_prompts_is_one_of_a_graph() -> None:
    for rounds in (*range(SHAPES[-1] + 1), 2000):
        room = prompt_room(rounds)
        assert room >= MIN_GRAPH_PROMPT
        assert rounds + room <= SHAPES[-1] or room == MIN_GRAPH_PROMPT


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


def test_a_step_with_prompts_that_takes_longer_than_said_makes_the_next_pieces_smaller() -> None:
    """For what the table does not know, such as scores of prompts. Where all steps take longer,
    because others keep the machine busy, prompts are not left behind."""
    now = [100.0]
    scheduler = Scheduler(TABLE, 16, clock=lambda: now[0])
    job = DraftedText(Text(text(5, 5), limit=2000))

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


SOME = CostTable((1, 2), (1.0, 1.0))


@given(
    st.lists(st.floats(1e-4, 1), min_size=2, max_size=6), st.integers(1, 500), st.floats(0, 5000)
)
def test_costs_rise_with_the_table_and_are_its_own_at_its_points(
    steps: list[float], tokens: int, context: float
) -> None:
    axis = tuple(2**i for i in range(len(steps)))
    column = list(accumulate(steps))
    live = Costs(CostTable(axis, tuple(column), 0.5, 1e-3, 1e-4))
    for sequences in (1, 3):
        rest = [sequences * (0.5 + 1e-3 * context) + n * 1e-4 * context for n in axis]
        assert [live.seconds(sequences, n, context)[0] for n in axis] == pytest.approx(
            [seconds + more for seconds, more in zip(column, rest, strict=True)]
        )
    growth = live.seconds(1, tokens, context, 39)
    assert all(0 < less <= more + 1e-12 for less, more in pairwise(growth))
    later = [live.seconds(1, tokens + count, context)[0] for count in range(40)]
    assert growth == pytest.approx(later), "wherever it begins"


def test_tables_are_kept_and_measured_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_decoder(model)  # before, so that no kernels are compiled there
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def loaded(measure: Any = lambda *_: SOME, *, again: bool = False) -> CostTable:
        made = load_scheduler(decoder, 2048, 64, again=again, measure=measure)
        return made.costs.profiled

    with torch.inference_mode():
        table = loaded(partial(profile, seconds=0.0))
        (file,) = (tmp_path / "paceline" / "costs").glob("*.json")
        assert loaded() == table
        assert loaded(again=True) == SOME
        for damaged in ("[1]", "{}", '{"table": {"tokens": [1]}, "learnt": null}', "no JSON"):
            file.write_text(damaged)
            assert loaded() == SOME, "a damaged file"


def test_a_table_measured_on_a_busy_machine_is_measured_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decoder, measure, scales = load_decoder(model), Mock(return_value=SOME), []
    for learnt in (0.9, 0.5, 1.0):  # of the table, as one process after the other finds it
        scheduler = load_scheduler(decoder, 2048, 64, measure=measure)
        scales.append(scheduler.costs.scale)
        scheduler.costs.scale = learnt
        save_scheduler(scheduler, decoder)
    assert scales == [1.0, 0.9, 1.0]
    assert measure.call_count == 2


def test_of_several_that_start_at_a_time_one_measures(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decoder, measure, began = load_decoder(model), Mock(return_value=SOME), Barrier(3)

    def load(_: int) -> CostTable:
        began.wait()
        return load_scheduler(decoder, 2048, 64, measure=measure).costs.profiled

    with ThreadPoolExecutor(3) as pool:
        tables = list(pool.map(load, range(3)))
    assert tables == [SOME] * 3
    assert measure.call_count == 1


@pytest.mark.parametrize(
    ("tokens", "seconds"), [((1,), (1.0,)), ((2, 1), (1.0, 1.0)), ((1, 2), (1.0, 0.0))]
)
def test_bad_tables(tokens: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        CostTable(tokens, seconds)


@pytest.mark.parametrize(
    ("ran", "asked", "truth"),
    [
        ((1, 8, 32), (1, 8, 32), lambda tokens: 0.0004 * (1 + tokens / 16)),
        # Of a GPU: beyond 256 tokens they take another time for each further one.
        ((64, 256, 384, 512), (64, 256, 288, 448), lambda n: 0.01 + max(0, n - 256) * 0.0001),
    ],
)
def test_a_table_is_corrected_as_steps_run(
    ran: tuple[int, ...], asked: tuple[int, ...], truth: Callable[[int], float]
) -> None:
    """A flat one takes on the scale and the shape of what is measured, up to the largest graph."""
    live = Costs(flat_table())
    assert set(SHAPES) <= set(live.profiled.tokens)
    for number in range(3000):
        tokens = ran[number % len(ran)]
        live.observe(1, tokens, 100.0, truth(tokens))
        if number > 100:
            live.observe(1, tokens, 100.0, 1.0)  # of a machine that stood still
    for tokens in asked:
        assert live.seconds(1, tokens, 100.0) == pytest.approx([truth(tokens)], rel=0.1)
