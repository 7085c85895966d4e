"""Runs the Triton kernels in its interpreter, on the CPU (see tests/conftest.py).

bfloat16 products are silently wrong there, so these tests use float16 and float32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.kernels import attention

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    """Skip where kernels cannot be interpreted."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    assert triton.knobs.runtime.interpret


@pytest.fixture
def products_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of tiles whose rows do not depend on their place, as on tensor cores: NumPy's add up
    in an order that does. Types of 16 bits are multiplied in float32, bfloat16 too."""
    from triton.runtime import interpreter

    def whole(tile: Any) -> Any:
        if tile.dtype.scalar.name == "bf16":  # kept as integers
            return (tile.data.astype(np.uint32) << 16).view(np.float32)
        return tile.data.astype(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right, total = whole(a), whole(b), d.data.astype(np.float32)
        for k in range(left.shape[1]):
            total = total + left[:, k : k + 1] * right[k]
        return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def triton_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU runs what a GPU would, from here on."""
    from paceline.kernels.triton.backend import TritonBackend, TritonRows

    monkeypatch.setitem(attention.LOADED, "cpu", TritonBackend())
    monkeypatch.setattr("paceline.kernels.operations.row_kernels", lambda device: TritonRows())
