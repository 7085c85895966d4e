"""Calls of libcuda, by a library in its place."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from paceline.kv.cuda_driver import CudaDriver, DriverError


class Library:
    """Records calls by name and writes 7 to their results; ``fails`` is the name of one that
    fails."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.fails = ""

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((name, len(arguments)))
            for argument in arguments:
                result = getattr(argument, "_obj", None)  # of byref()
                if isinstance(result, ctypes.Array):
                    result[0] = 7
                elif isinstance(result, ctypes.c_char_p):
                    result.value = b"no such thing"
                elif result is not None:
                    result.value = 7
            return 101 if name == self.fails else 0

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    return made


@pytest.mark.parametrize(
    ("act", "result", "call"),
    [
        (lambda driver: driver.devices(), 7, ("cuDeviceGetCount", 1)),
        (lambda driver: driver.uuid(0), b"\7" + bytes(15), ("cuDeviceGetUuid_v2", 2)),
        (lambda driver: driver.allocate(0, 9), 7, ("cuMemAlloc_v2", 2)),
        (lambda driver: driver.free(0, 9), None, ("cuMemFree_v2", 1)),
        (lambda driver: driver.export(0, 9), b"\7" + bytes(63), ("cuIpcGetMemHandle", 2)),
        (lambda driver: driver.open(0, bytes(64)), 7, ("cuIpcOpenMemHandle_v2", 3)),
        (lambda driver: driver.size(0, 9), 7, ("cuMemGetAddressRange_v2", 3)),
        (lambda driver: driver.close(0, 9), None, ("cuIpcCloseMemHandle", 1)),
        (lambda driver: driver.reach(0, 1), True, ("cuCtxEnablePeerAccess", 2)),
    ],
)
def test_calls(library: Library, act: Any, result: Any, call: tuple[str, int]) -> None:
    driver = CudaDriver()
    assert act(driver) == result
    assert call in library.calls
    pushed, popped = (
        [name for name, _ in library.calls].count(name)
        for name in ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
    )
    assert pushed == popped


def test_an_error_is_that_of_the_driver(library: Library) -> None:
    driver = CudaDriver()
    library.fails = "cuMemAlloc_v2"
    with pytest.raises(DriverError, match=r"cuMemAlloc_v2: no such thing \(101\)"):
        driver.allocate(0, 9)
    assert library.calls[-1][0] == "cuCtxPopCurrent_v2"
