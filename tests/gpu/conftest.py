"""Tests on an NVIDIA GPU, run by `make gpu-check` with the Python at hand.

They skip without a CUDA device. ``tests/conftest.py`` hides devices, so `make gpu-check` leaves it
out (``--confcutdir``).
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.device import device_of

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("kernels", "processes")]


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device; on a machine with one, run make gpu-check")
    return device_of("cuda:0").torch


@pytest.fixture
def device(cuda: torch.device) -> Iterator[torch.device]:
    """The device, with everything random seeded. Tests run side by side in several processes, so
    the memory of each is given back at its end."""
    torch.manual_seed(0)
    yield cuda
    torch.cuda.empty_cache()
