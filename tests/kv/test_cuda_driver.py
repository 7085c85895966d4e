"""Errors of libcuda, by a library in its place; tests/gpu tests the calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from paceline.kv.cuda import CudaDriver, DriverError


class Library:
    """All its calls succeed, but for an allocation."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            for argument in arguments:
                if isinstance(text := getattr(argument, "_obj", None), ctypes.c_char_p):
                    text.value = b"no such thing"  # by byref()
            return 101 if name == "cuMemAlloc_v2" else 0

        return call


def test_an_error_is_that_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    with pytest.raises(DriverError, match=r"cuMemAlloc_v2: no such thing \(101\)"):
        CudaDriver().allocate(0, 9)
    assert library.calls[-1] == "cuCtxPopCurrent_v2"
