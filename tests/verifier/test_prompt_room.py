"""Prompts of other texts do not hold rounds up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from verifier_support import make_model, text

from paceline.decoder import Decoder
from paceline.decoder.graphs import SHAPES
from paceline.verifier.engine.batch import MIN_PROMPT, prompt_room
from paceline.verifier.engine.engine import Engine
from paceline.verifier.engine.job import Decode, GenerationParams, Prefill, Sequence
from paceline.verifier.kv.base import KvLayout
from paceline.verifier.kv.pool import PagePool
from paceline.verifier.scheduler.costs import flat_table
from paceline.verifier.scheduler.scheduler import Scheduler


@pytest.mark.parametrize("rounds", [*range(0, SHAPES[-1] + 1, 7), 2000])
def test_a_step_of_rounds_and_prompts_is_one_of_a_graph(rounds: int) -> None:
    room = prompt_room(rounds)
    assert room >= MIN_PROMPT
    assert rounds + room <= SHAPES[-1] or room == MIN_PROMPT


class NoGraphs:
    """Graphs of which none is large enough; notes the sizes of steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def forward(self, tokens: list[int], *_: Any) -> None:
        self.steps.append(len(tokens))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder.load(make_model(tmp_path_factory.mktemp("model") / "llama", "Llama"))


@pytest.fixture
def pool(decoder: Decoder) -> Iterator[PagePool]:
    made = PagePool(
        KvLayout.of(decoder.config), torch.device("cpu"), kv_bytes=1 << 26, max_sequences=4,
        max_context=2048,
    )  # fmt: skip
    yield made
    made.close()


def step(engine: Engine) -> int:
    """Runs a step; returns its size."""
    sizes: list[int] = []
    engine.on_step = lambda seconds, tokens, decided: sizes.append(tokens)
    engine._thread.run_commands(0.0)
    engine._step()
    return sum(sizes)


def sequence(pool: PagePool, length: int) -> Sequence:
    params = GenerationParams(tuple(text(length, length)), length_limit=2000)
    return Sequence(params, pool.allocate(2048, None))


def test_a_long_prompt_beside_a_generation_leaves_its_steps_short(
    decoder: Decoder, pool: PagePool
) -> None:
    """Of graphs. Alone it takes as many tokens as a step has for prompts."""
    graphs: Any = NoGraphs()
    engine = Engine(decoder, graphs=graphs)
    short, long = sequence(pool, 5), sequence(pool, 1500)
    with torch.inference_mode():
        engine.prefill(Prefill(short))
        assert step(engine) == 5
        job = Decode(short, credits=2)
        engine.decode(job)
        engine.prefill(Prefill(long))
        assert [step(engine) for _ in range(2)] == [256, 256]
        assert len(short.tokens) == 5 + 1 + 2
        assert step(engine) == 512
    for each in (short, long):
        each.kv.close()


def test_a_step_of_prompts_waits_for_trees_that_come_soon(
    decoder: Decoder, pool: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If more rounds would wait for its end than prompts for the trees."""
    now = 100.0
    engine = Engine(decoder, scheduler=Scheduler(flat_table(), 16, clock=lambda: now))
    arrivals: list[float] = []
    drafting: Any = engine._drafting
    monkeypatch.setattr(drafting, "arrivals", lambda: arrivals)
    prompt = sequence(pool, 40)
    engine.prefill(Prefill(prompt))
    engine._thread.run_commands(0.0)
    arrivals[:] = [now + 0.001] * 3  # of a step of 10 ms
    assert engine._hold() == 0.0, "no tree is asked for"
    drafting.waiting = {object(): now + 1.0}
    assert engine._hold() == pytest.approx(0.001)
    arrivals[:] = [now + 0.009]
    assert engine._hold() == 0.0
    prompt.kv.close()
