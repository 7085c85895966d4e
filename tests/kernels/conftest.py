"""Makes the helpers beside the tests importable, and chooses attention backends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.kernels import AttentionBackend, attention
from paceline.kernels._cpu import CpuBackend
from paceline.kernels._native import library
from paceline.kernels._native_attention import NativeBackend

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=["native", "cpu"], scope="module")
def cpu_backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    """The CPU's attention backends, each in its turn the one that ``tree_attention`` uses."""
    backend: AttentionBackend = CpuBackend()
    if request.param == "native":
        found = library()
        if found is None:
            pytest.skip("no gcc: the compiled kernels can't be built")
        backend = NativeBackend(found, fallback=backend)
    before = attention._LOADED.get("cpu")
    attention._LOADED["cpu"] = backend
    yield backend
    attention._LOADED.pop("cpu")
    if before is not None:
        attention._LOADED["cpu"] = before
