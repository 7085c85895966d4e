import argparse

import pytest

from paceline.cli.supervisor import BackOff
from paceline.cli.units import byte_count


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("4096", 4096), ("512MiB", 1 << 29), ("1.5gib", 3 << 29), ("2 KiB", 2048)],
)
def test_byte_counts(text: str, size: int) -> None:
    assert byte_count(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1GB", "x", "1e3", "0.1", "MiB", "٣"])
def test_invalid_byte_counts(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        byte_count(text)


def test_back_off_doubles_up_to_its_limit_and_starts_again_after_a_steady_life() -> None:
    back_off = BackOff(first=0.5, longest=3.0, steady=60.0)
    assert [back_off.delay(uptime=1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert back_off.delay(uptime=60.0) == 0.5
    assert back_off.delay(uptime=1.0) == 1.0
