"""The plan of a run."""

from collections.abc import Callable

import pytest

from paceline.train.loop import Clock
from paceline.train.presets import LM_PRESETS, Preset, Stage
from paceline.train.run import Run

MakeRun = Callable[..., Run]


@pytest.mark.parametrize("preset", LM_PRESETS.values(), ids=list(LM_PRESETS))
def test_a_language_model_s_plan(preset: Preset) -> None:
    """Rates warm up, stay and fall; the last rows fill the context."""
    plan = preset.plan(minutes=10, steps=1000)
    assert plan.rate(0, 0.0) < 0.1
    assert plan.rate(300, 0.5) == 1
    falling = [plan.rate(900, share / 100) for share in range(50, 101, 10)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(0.03)
    assert sum(stage.share for stage in preset.stages) == pytest.approx(1)
    assert plan.documents(0.0) is None
    assert plan.documents(0.99) == (preset.focus_files if preset.stages[-1].focus else None)
    assert plan.shape(0.99)[1] == preset.context >= 4096


def test_a_pause_within_a_step_is_not_counted() -> None:
    clock = Clock()
    for _ in range(10):
        clock.add(1.0)
    clock.add(3600.0)
    assert clock.elapsed == pytest.approx(11)


def test_rows_longer_than_the_context_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Preset(**{**vars(LM_PRESETS["lm"]), "stages": (Stage("long", 1.0, rows=1, length=8192),)})
