"""Which devices drafters may compute on, and that they keep to theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.drafter import build_service


@pytest.mark.parametrize("device", ["tpu", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"device is .*expected"):
        build_service([], device=device)


@pytest.mark.slow
def test_services_keep_their_tensors_on_one_device() -> None:
    """In a process of its own: PyTorch is told of a device that is not there."""
    tests = Path(__file__).parents[1]
    cases = [tests / service / "on_another_device.py" for service in ("drafter", "verifier")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, cases)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    assert "20 passed" in done.stdout
