"""Choosing a backend, the plain one, and the CPU one under threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kernel_cases import make_case
from reference import reference_attention

from paceline.kernels import AttentionCall, attention, backend_for, plan_trees, register_backend
from paceline.kernels.dense import DenseBackend

PARENTS = (-1, 0, 0, 1, 3, 3, 2)


def test_the_backend_follows_the_device() -> None:
    assert backend_for("cpu").name == "dense"
    assert backend_for(torch.device("cpu")) is backend_for("cpu")


def test_an_unknown_device_is_a_clear_error() -> None:
    with pytest.raises(RuntimeError, match="no attention backend for device type 'meta'"):
        backend_for("meta")


def test_a_backend_can_be_added_without_touching_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_FACTORIES", dict(attention._FACTORIES))
    monkeypatch.setattr(attention, "_LOADED", dict(attention._LOADED))
    register_backend("meta", DenseBackend)
    assert backend_for("meta").name == "dense"


@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize("start", [0, 17, 700])
def test_the_plain_one_gives_the_log_sum_exp(start: int, window: int | None) -> None:
    case = make_case(3, start, PARENTS, window=window)
    plan, lse = plan_trees([case.segment]), torch.empty(case.q.shape[:2])
    DenseBackend().attend(
        AttentionCall(
            case.q,
            [case.key],
            [case.value],
            plan,
            case.scale,
            window,
            torch.empty_like(case.q),
            lse,
        )
    )
    _, expected = reference_attention(
        case.q, [case.key], [case.value], plan, scale=case.scale, window=window
    )
    torch.testing.assert_close(lse.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.usefixtures("cpu_backend")
def test_threads_do_not_share_scratch() -> None:
    cases = [make_case(i, start, PARENTS) for i, start in enumerate((0, 200, 254, 700))] * 8
    expected = [case.run() for case in cases]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda case: case.run(), cases))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
