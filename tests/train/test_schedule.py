import pytest

from paceline.train.preset import PRESETS, Preset
from paceline.train.schedule import Clock, Schedule


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_rates_warm_up_stay_and_fall(preset: Preset) -> None:
    schedule = Schedule(preset, minutes=10, steps=1000)
    assert schedule.rate(0, 0.0) < 0.1
    assert schedule.rate(300, preset.decay_from) == 1
    falling = [schedule.rate(900, share / 100) for share in range(50, 101, 10)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(preset.final_rate)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_the_last_rows_fill_the_context(preset: Preset) -> None:
    schedule = Schedule(preset, minutes=10, steps=1000)
    assert schedule.shape(0.0) == preset.shapes[0][1:]
    assert schedule.shape(0.99) == preset.shapes[-1][1:]
    assert preset.shapes[-1][2] == preset.context
    assert preset.context >= 4096


def test_a_pause_within_a_step_is_not_counted() -> None:
    clock = Clock()
    for _ in range(10):
        clock.add(1.0)
    clock.add(3600.0)
    assert clock.elapsed == pytest.approx(11)


def test_rows_longer_than_the_context_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Preset(**{**vars(PRESETS["cpu"]), "shapes": ((0, 1, 8192),)})
