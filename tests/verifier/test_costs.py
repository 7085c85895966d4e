"""What steps cost: the table, and where it is kept."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.convert import load_decoder
from paceline.device import SHAPES
from paceline.verifier.scheduler import costs
from paceline.verifier.scheduler import scheduler as scheduling
from paceline.verifier.scheduler.costs import Costs, CostTable, flat_table

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
        made = scheduling.load_scheduler(decoder, 2048, 64, again=again, measure=measure)
        return made.costs.profiled

    with torch.inference_mode():
        table = loaded(partial(costs.profile, seconds=0.0))
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
    decoder, measured = load_decoder(model), 0

    def count(*_: object) -> CostTable:
        nonlocal measured
        measured += 1
        return SOME

    scales = []
    for learnt in (0.9, 0.5, 1.0):  # of the table, as one process after the other finds it
        scheduler = scheduling.load_scheduler(decoder, 2048, 64, measure=count)
        scales.append(scheduler.costs.scale)
        scheduler.costs.scale = learnt
        scheduling.save_scheduler(scheduler, decoder)
    assert scales == [1.0, 0.9, 1.0]
    assert measured == 2


def test_of_several_that_start_at_a_time_one_measures(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decoder, measured = load_decoder(model), []
    began = Barrier(3)

    def one(*_: object) -> CostTable:
        measured.append(SOME)
        return SOME

    def load(_: int) -> CostTable:
        began.wait()
        return scheduling.load_scheduler(decoder, 2048, 64, measure=one).costs.profiled

    with ThreadPoolExecutor(3) as pool:
        tables = list(pool.map(load, range(3)))
    assert tables == [SOME] * 3
    assert len(measured) == 1


@pytest.mark.parametrize(
    ("tokens", "seconds"), [((1,), (1.0,)), ((2, 1), (1.0, 1.0)), ((1, 2), (1.0, 0.0))]
)
def test_bad_tables(tokens: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        CostTable(tokens, seconds)


def test_a_table_is_corrected_as_steps_run() -> None:
    """A flat one takes on the scale and the shape of what is measured."""
    live = Costs(flat_table())

    def truth(tokens: int) -> float:
        return 0.0004 * (1 + tokens / 16)

    for number in range(3000):
        tokens = (1, 8, 32)[number % 3]
        live.observe(1, tokens, 100.0, truth(tokens))
        live.observe(1, tokens, 100.0, 1.0 if number > 100 else truth(tokens))
    for tokens in (1, 8, 32):
        assert live.seconds(1, tokens, 100.0) == pytest.approx([truth(tokens)], rel=0.1)


def test_steps_of_a_gpu_are_known_up_to_the_largest_graph() -> None:
    """Beyond 256 tokens they take another time for each further one."""
    live = Costs(flat_table())
    assert set(SHAPES) <= set(live.profiled.tokens)

    def truth(tokens: int) -> float:
        return 0.01 + max(0, tokens - 256) * 0.0001

    for number in range(3000):
        tokens = (64, 256, 384, 512)[number % 4]
        live.observe(1, tokens, 100.0, truth(tokens))
    for tokens in (64, 256, 288, 448):
        assert live.seconds(1, tokens, 100.0) == pytest.approx([truth(tokens)], rel=0.1)
