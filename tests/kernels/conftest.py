"""Attention backends."""

from collections.abc import Iterator
from typing import cast

import pytest
from kernel_cases import BACKENDS, LEVELS, ProgramBackend, compiled, usually

from paceline.bench.reference import ReferenceKernels
from paceline.kernels import DeviceKernels, devices

Attends = ProgramBackend | ReferenceKernels


@pytest.fixture(params=BACKENDS, ids="-".join, scope="module")
def native_backend(request: pytest.FixtureRequest) -> Iterator[Attends]:
    """The compiled attention of each level, in its turn the one that ``tree_attention`` uses.

    Numerics of some processors are those of the fastest level: instructions of the processor, or
    their emulation.
    """
    level, numerics = request.param
    yield from _serving(ProgramBackend(compiled(level), numerics))


@pytest.fixture(params=[*map(usually, LEVELS), "reference"], scope="module")
def cpu_backend(request: pytest.FixtureRequest) -> Iterator[Attends]:
    """The compiled attention of every level, and the reference."""
    if request.param == "reference":
        yield from _serving(ReferenceKernels())
    else:
        yield from _serving(ProgramBackend(compiled(request.param)))


def _serving(backend: Attends) -> Iterator[Attends]:
    before = devices.LOADED.get("cpu")
    devices.LOADED["cpu"] = cast("DeviceKernels", backend)
    yield backend
    devices.LOADED.pop("cpu")
    if before is not None:
        devices.LOADED["cpu"] = before
