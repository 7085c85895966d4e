"""Choosing a backend, the plain one, and the CPU one under threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kernel_cases import make_case

from paceline.kernels import attention, backend_for, register_backend
from paceline.kernels._dense import DenseBackend
from paceline.kernels._native import library

PARENTS = (-1, 0, 0, 1, 3, 3, 2)


def test_the_backend_follows_the_device() -> None:
    assert backend_for("cpu").name == ("dense" if library() is None else "native")
    assert backend_for(torch.device("cpu")) is backend_for("cpu")


def test_an_unknown_device_is_a_clear_error() -> None:
    with pytest.raises(RuntimeError, match="no attention backend for device type 'meta'"):
        backend_for("meta")


def test_a_backend_can_be_added_without_touching_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_FACTORIES", dict(attention._FACTORIES))
    monkeypatch.setattr(attention, "_LOADED", dict(attention._LOADED))
    register_backend("cpu", DenseBackend)
    assert backend_for("cpu").name == "dense"


@pytest.mark.usefixtures("cpu_backend")
def test_threads_do_not_share_scratch() -> None:
    cases = [make_case(i, start, PARENTS) for i, start in enumerate((0, 200, 254, 700))] * 8
    expected = [case.run()[0] for case in cases]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda case: case.run()[0], cases))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
