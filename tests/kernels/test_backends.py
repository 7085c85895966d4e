"""Choosing the kernels of a device, the reference, and the plans that they are given."""

import sys
from types import SimpleNamespace

import pytest
import torch

from paceline.cuda.kernels import cuda_kernels, preferred_backend, why_bits_vary
from paceline.kernels import (
    MAX_TREE_NODES,
    QueryBlock,
    devices,
    kernels_for,
    plan_trees,
)


def test_a_device_without_kernels_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LOADED", {})
    for kind in ("meta", "cpu"):
        with pytest.raises(RuntimeError, match=f"no kernels for device type '{kind}'"):
            kernels_for(kind)


def test_triton_is_used_unless_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_ATTENTION", raising=False)
    assert preferred_backend() == "triton"
    monkeypatch.setenv("PACELINE_ATTENTION", "flash_attn")
    assert preferred_backend() == "flash_attn"
    monkeypatch.setenv("PACELINE_ATTENTION", "dense")
    with pytest.raises(RuntimeError, match="expected one of triton, flash_attn"):
        preferred_backend()


def test_without_triton_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(RuntimeError, match=r"install paceline\[cuda\], or use --device cpu"):
        cuda_kernels("triton")


def test_what_may_have_other_bits_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, why in (("triton", ""), ("flash_attn", "PACELINE_ATTENTION")):
        monkeypatch.setitem(devices.LOADED, "cuda", SimpleNamespace(name=name))
        assert why in why_bits_vary(torch.device("cuda"))
        assert bool(why_bits_vary(torch.device("cuda"))) == bool(why)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_a_gpu_that_is_too_old_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(devices, "LOADED", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    kernels_for("cuda:0")
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
