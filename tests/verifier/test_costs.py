"""What steps cost: the table, and where it is kept."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, islice, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoder import Decoder
from paceline.verifier.scheduler import profile, storage
from paceline.verifier.scheduler.costs import CostTable, LiveCosts
from paceline.verifier.scheduler.profile import flat_table
from paceline.verifier.scheduler.scheduler import Scheduler

SOME = CostTable((1, 2), (1, 2), ((1.0, 1.0), (1.0, 1.0)))


@given(
    st.lists(st.floats(1e-4, 1), min_size=2, max_size=6),
    st.integers(1, 500),
    st.floats(0, 5000),
)
def test_costs_rise_with_the_table_and_are_its_own_at_its_points(
    steps: list[float], tokens: int, context: float
) -> None:
    axis = tuple(2**i for i in range(len(steps)))
    column = list(accumulate(steps))
    table = CostTable(axis, (10, 1000), tuple((v, 2 * v) for v in column))
    assert [table.step_seconds(1, n, n * 10.0) for n in axis] == pytest.approx(column)
    assert [table.step_seconds(1, n, n * 1000.0) for n in axis] == pytest.approx(
        [2 * v for v in column]
    )
    costs = LiveCosts(table)
    growth = list(islice(costs.growth(tokens, context), 40))
    assert all(0 < less <= more + 1e-12 for less, more in pairwise(growth))
    later = [next(costs.growth(tokens + count, context)) for count in range(40)]
    assert growth == pytest.approx(later), "wherever it begins"


def test_tables_are_kept_and_measured_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profile, "_BUDGET", 0.0)
    decoder = Decoder.load(model)
    with torch.inference_mode():
        table = storage.cost_table(decoder, 2048)
        (file,) = (tmp_path / "paceline" / "costs").glob("*.json")
        assert CostTable.from_json(file.read_text()) == table
        monkeypatch.setattr(storage, "profile", lambda *_: SOME)
        assert storage.cost_table(decoder, 2048) == table
        assert storage.cost_table(decoder, 99) == SOME, "other contexts"
        assert storage.cost_table(decoder, 2048, again=True) == SOME
        file.write_text('{"tokens": [1]}')
        assert storage.cost_table(decoder, 2048) == SOME, "a damaged file"


def test_a_table_measured_on_a_busy_machine_is_measured_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decoder, measured = Decoder.load(model), 0

    def count(*_: object) -> CostTable:
        nonlocal measured
        measured += 1
        return SOME

    monkeypatch.setattr(storage, "profile", count)
    scales = []
    for learnt in (0.9, 0.5, 1.0):  # of the table, as one process after the other finds it
        scheduler = Scheduler(storage.cost_table(decoder, 2048), 64)
        storage.load_state(scheduler, decoder, 2048)
        state = scheduler.to_json()
        scales.append(state["costs"]["common"])
        state["costs"]["common"] = learnt
        scheduler.load_json(state)
        storage.save_state(scheduler, decoder, 2048)
    assert scales == [1.0, 0.9, 1.0]
    assert measured == 2


def test_a_table_that_cannot_be_kept_serves_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "paceline").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(storage, "profile", lambda *_: SOME)
    assert storage.cost_table(Decoder.load(model), 2048) == SOME


def test_of_several_that_start_at_a_time_one_measures(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decoder, measured = Decoder.load(model), []

    def slow(*_: object) -> CostTable:
        measured.append(SOME)
        time.sleep(0.05)
        return SOME

    monkeypatch.setattr(storage, "profile", slow)
    with ThreadPoolExecutor(3) as pool:
        tables = list(pool.map(lambda _: storage.cost_table(decoder, 2048), range(3)))
    assert tables == [SOME] * 3
    assert len(measured) == 1


@pytest.mark.parametrize(
    ("tokens", "table"),
    [((1,), ((1.0, 1.0),)), ((2, 1), ((1.0, 1.0), (1.0, 1.0))), ((1, 2), ((1.0, 0.0), (1.0, 1.0)))],
)
def test_bad_tables(tokens: tuple[int, ...], table: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        CostTable(tokens, (1, 2), table)


def test_a_table_is_corrected_as_steps_run() -> None:
    """A flat one takes on the scale and the shape of what is measured."""
    costs = LiveCosts(flat_table(4096))

    def truth(tokens: int) -> float:
        return 0.0004 * (1 + tokens / 16)

    for number in range(3000):
        tokens = (1, 8, 32)[number % 3]
        costs.observe(1, tokens, 100.0 * tokens, truth(tokens))
        costs.observe(1, tokens, 100.0 * tokens, 1.0 if number > 100 else truth(tokens))
    for tokens in (1, 8, 32):
        assert next(costs.growth(tokens, 100.0)) == pytest.approx(truth(tokens), rel=0.1)
