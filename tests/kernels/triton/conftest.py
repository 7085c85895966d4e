"""Runs the Triton kernels in its interpreter, on the CPU (see tests/conftest.py).

bfloat16 products are silently wrong there, so these tests use float16 and float32.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    """Skip where kernels cannot be interpreted."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    assert triton.knobs.runtime.interpret
