"""The clock of a run."""

import pytest

from paceline.train.loop import Clock


def test_a_pause_within_a_step_is_not_counted() -> None:
    clock = Clock()
    for _ in range(10):
        clock.add(1.0)
    clock.add(3600.0)
    assert clock.elapsed == pytest.approx(11)
