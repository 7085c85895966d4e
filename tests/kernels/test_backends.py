"""Choosing a backend, the plain one, and the plans that they are given."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import make_case

from paceline.kernels import (
    MAX_TREE_NODES,
    AttentionCall,
    QueryBlock,
    attention,
    backend_for,
    plan_trees,
    triton,
    why_bits_vary,
)
from paceline.kernels.attention import cuda_backend, preferred_backend
from paceline.kernels.dense import DenseBackend
from paceline.kernels.rotated import quantise_rows
from paceline.kernels.rows import row_kernels
from paceline.kernels.sampling import best_candidates

PARENTS = (-1, 0, 0, 1, 3, 3, 2)


def test_the_backend_follows_the_device() -> None:
    assert backend_for("cpu").name == "dense"
    assert backend_for(torch.device("cpu")) is backend_for("cpu")


def test_an_unknown_device_is_a_clear_error() -> None:
    with pytest.raises(RuntimeError, match="no attention backend for device type 'meta'"):
        backend_for("meta")


@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize("start", [0, 17, 700])
def test_the_plain_one_gives_the_log_sum_exp(start: int, window: int | None) -> None:
    case = make_case(3, start, PARENTS, window=window)
    lse, out, plan = torch.empty(case.q.shape[:2]), case.q.clone(), plan_trees([case.block])
    DenseBackend().attend(
        AttentionCall(case.q, [case.key], [case.value], plan, case.scale, window, out, lse)
    )
    torch.testing.assert_close(lse.double(), case.expected()[1], atol=2e-5, rtol=1e-5)
    sinks = torch.linspace(-2, 8, case.q.shape[1])
    attended, total = case.expected()
    shares = (total - sinks).sigmoid()[..., None]  # what the sinks leave
    found = case.run_by(DenseBackend(), sinks=sinks)
    torch.testing.assert_close(found.double(), attended * shares, atol=1e-4, rtol=1e-4)


def test_triton_is_used_unless_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_ATTENTION", raising=False)
    assert preferred_backend() == "triton"
    monkeypatch.setenv("PACELINE_ATTENTION", "dense")
    assert preferred_backend() == "dense"
    monkeypatch.setenv("PACELINE_ATTENTION", "flashinfer")
    with pytest.raises(RuntimeError, match="expected one of triton, flash_attn, dense"):
        preferred_backend()


def test_a_missing_package_gives_way_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert cuda_backend("dense").name == "dense"
    monkeypatch.setitem(sys.modules, "triton", None)
    triton.is_installed.cache_clear()
    try:
        assert [triton.runs_on(device) for device in ("meta", "cuda:0", "cpu")] == [False] * 3
        assert cuda_backend("triton").name == "dense"
    finally:
        monkeypatch.undo()
        triton.is_installed.cache_clear()
    (record,) = (each for each in caplog.records if "Triton cannot be imported" in each.message)
    assert record.levelname == "WARNING"


def test_an_import_error_in_a_kernel_of_ours_is_no_missing_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A renamed symbol would otherwise turn a GPU into operations of PyTorch without a word."""
    pytest.importorskip("triton")
    assert triton.runs_on("meta")
    x = torch.zeros(1, 32, device="meta")
    for module, run in (
        ("products", lambda: quantise_rows(x, 32)),
        ("backend", lambda: row_kernels("meta")),
        ("backend", lambda: cuda_backend("triton")),
        ("candidates", lambda: best_candidates(x, 2, 1.0, None)),
    ):
        monkeypatch.setitem(sys.modules, f"paceline.kernels.triton.{module}", None)
        with pytest.raises(ImportError):
            run()


def test_what_may_have_other_bits_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, why in (("triton", ""), ("flash_attn", "PACELINE_ATTENTION"), ("dense", "Triton")):
        monkeypatch.setitem(attention.LOADED, "meta", SimpleNamespace(name=name))
        found = why_bits_vary("meta")
        assert why in found
        assert bool(found) == bool(why)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_a_gpu_that_is_too_old_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    attention._cuda()
    assert bool(caplog.records) == (capability < (8, 0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, None, 0), "0 nodes"),
        ((0, 0, None, MAX_TREE_NODES + 1), "expected 1 to 256"),
        ((0, -1, None, 1), "must not be negative"),
        ((-1, 0, None, 1), "must not be negative"),
        ((0, 0, (-1,), 2), "1 parents"),
        ((0, 0, (-1, 1), 2), "topological order"),
        ((0, 0, (-2,), 1), "topological order"),
    ],
)
def test_bad_blocks_are_refused(
    arguments: tuple[int, int, tuple[int, ...] | None, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        QueryBlock(*arguments)


def test_an_empty_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one query block"):
        plan_trees([])
