"""Makes the helpers beside the tests importable, and chooses attention backends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.kernels import AttentionBackend, attention
from paceline.kernels.dense import DenseBackend

sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import BACKENDS, LEVELS, ProgramBackend, compiled


@pytest.fixture(params=BACKENDS, ids="-".join, scope="module")
def native_backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    """The compiled attention of each level, in its turn the one that ``tree_attention`` uses.

    Numerics of some processors are those of the fastest level: instructions of the processor, or
    their emulation.
    """
    level, numerics = request.param
    yield from _serving(ProgramBackend(compiled(level), numerics))


@pytest.fixture(params=[*LEVELS, "none"], scope="module")
def cpu_backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    """Every backend of the CPU, the plain PyTorch one included."""
    if request.param == "none":
        yield from _serving(DenseBackend())
    else:
        yield from _serving(ProgramBackend(compiled(request.param)))


def _serving(backend: AttentionBackend) -> Iterator[AttentionBackend]:
    before = attention.LOADED.get("cpu")
    attention.LOADED["cpu"] = backend
    yield backend
    attention.LOADED.pop("cpu")
    if before is not None:
        attention.LOADED["cpu"] = before
