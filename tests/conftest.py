"""Settings for all tests."""

import os
import sys
from pathlib import Path

import pytest

# Tiny models in many processes: a second thread in each only makes them wait for one another.
# Before anything imports torch, and inherited by every service process.
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parent))  # for what several folders use
# Triton decides when it is imported whether its kernels are interpreted on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what rests on equal bits where torch operations, which promise none, take the place of
    the compiled kernels."""
    if item.get_closest_marker("bits") is not None:
        from paceline.kernels._native import cpu_kernels

        if cpu_kernels().library is None:
            pytest.skip(
                f"no compiled CPU kernels, so no promise of equal bits: {cpu_kernels().origin}"
            )
