"""Choice of devices, with simulated GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.decoder import find_device
from paceline.drafter.service import drafting_device


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr("paceline.drafter.service._has_driver", lambda: count > 0)


@pytest.mark.parametrize(
    ("count", "verifier", "drafter"),
    [(0, "cpu", "cpu"), (1, "cuda:0", "cuda:0"), (2, "cuda:0", "cuda:1"), (8, "cuda:0", "cuda:1")],
)
def test_auto_takes_gpus_apart_where_there_are_two(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    count: int,
    verifier: str,
    drafter: str,
) -> None:
    with_gpus(monkeypatch, count)
    caplog.set_level(logging.INFO, "paceline.device")
    assert str(find_device("auto")) == verifier
    assert drafting_device("auto") == drafter
    for record, device in zip(caplog.records, (verifier, drafter), strict=True):
        where = "the CPU" if device == "cpu" else device
        assert f"device auto: using {where}," in record.getMessage()


def test_a_driver_without_a_gpu_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0)
    monkeypatch.setattr("paceline.drafter.service._has_driver", lambda: True)
    assert drafting_device("auto") == "cpu"


@pytest.mark.parametrize("find", [find_device, drafting_device])
def test_named_devices_are_those_or_none(monkeypatch: pytest.MonkeyPatch, find: object) -> None:
    assert callable(find)
    with_gpus(monkeypatch, 2)
    found = {name: str(find(name)) for name in ("cpu", "cuda", "cuda:1")}
    assert found == {"cpu": "cpu", "cuda": "cuda:0", "cuda:1": "cuda:1"}
    for name, problem in (
        ("cuda:2", "one of the 2"),
        ("tpu", "expected auto, cpu, cuda or cuda:N"),
    ):
        with pytest.raises(ValueError, match=problem):
            find(name)


@pytest.mark.parametrize("find", [find_device, drafting_device])
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_driver_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, find: Callable[[str], object], name: str
) -> None:
    """PyTorch counts the GPUs of such a driver."""
    with_gpus(monkeypatch, 1)

    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(ValueError, match=r"too old \(found version 12020\).*update the NVIDIA"):
        find(name)


def test_a_service_that_shares_a_gpu_is_told_whether_it_takes_turns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with_gpus(monkeypatch, 1)
    caplog.set_level(logging.INFO, "paceline.device")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    find_device("auto")
    assert "no MPS" in caplog.text
    caplog.clear()
    (tmp_path / "control").touch()
    find_device("auto")
    assert "no MPS" not in caplog.text
