"""Choosing a backend, the plain one, and the CPU one under threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kernel_cases import make_case

from paceline.kernels import attention, backend_for, plan_trees, register_backend
from paceline.kernels._dense import DenseBackend
from paceline.kernels._native import library
from paceline.kernels.reference import reference_attention

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize("start", [0, 253, 600])
def test_the_plain_backend_agrees_with_the_reference(
    start: int, window: int | None, dtype: torch.dtype
) -> None:
    case = make_case(start, start, PARENTS, dtype=dtype, window=window)
    plan = plan_trees([case.segment])
    out, lse = torch.empty(case.q.shape), torch.empty(case.q.shape[:2])
    DenseBackend().attend(
        case.q, [case.key], [case.value], plan, scale=case.scale, window=window, out=out, lse=lse
    )
    expected, expected_lse = reference_attention(
        case.q, [case.key], [case.value], plan, scale=case.scale, window=window
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=1e-5)


@pytest.mark.usefixtures("cpu_backend")
def test_threads_do_not_share_scratch() -> None:
    cases = [make_case(i, start, PARENTS) for i, start in enumerate((0, 200, 254, 700))] * 8
    expected = [case.run()[0] for case in cases]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda case: case.run()[0], cases))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
