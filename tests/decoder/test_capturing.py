"""How graphs are captured: streams, errors, and what other threads may do meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.decoder import Capturing, device_lost
from paceline.decoder import device as device_module

GPU = torch.device("cuda", 0)


class Cuda:
    """What captures call; a capture that an error breaks cannot end well."""

    def __init__(self) -> None:
        self.streams = self.captures = self.waits = self.emptied = 0
        self.capturing = self.broken = False

    def empty(self) -> None:
        assert not self.capturing
        self.emptied += 1

    def Stream(self, device: object) -> Any:
        self.streams += 1
        return SimpleNamespace(
            wait_stream=lambda other: None, synchronize=self._wait, device=device
        )

    def current_stream(self, device: object) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None, synchronize=self._wait)

    def _wait(self) -> None:
        assert not self.capturing
        self.waits += 1

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(
            capture_begin=self._begin, capture_end=self._end, pool=lambda: (1, 0), replay=int
        )

    def _begin(self, **options: object) -> None:
        assert options["capture_error_mode"] == "thread_local"
        assert ("pool" in options) == (self.captures > 0), "graphs share their memory"
        self.capturing, self.captures = True, self.captures + 1

    def _end(self) -> None:
        self.capturing = False
        if self.broken:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    monkeypatch.setattr(torch.cuda, "empty_cache", fake.empty)
    for name in ("Stream", "current_stream", "stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def test_all_graphs_are_captured_on_one_stream_which_alone_is_waited_for(cuda: Cuda) -> None:
    """Libraries keep a workspace for each stream, and other threads use the device."""
    capturing, runs = Capturing(GPU), []
    for number in range(48):
        capturing.capture(lambda number=number: runs.append(number))()
    assert (cuda.streams, cuda.captures, cuda.waits) == (1, 48, 48)
    assert not cuda.emptied, "which waits for the whole device"
    capturing.release()
    assert cuda.emptied == 1
    assert len(runs) == 3 * 48, "kernels are compiled and workspaces allocated before a capture"


@pytest.mark.parametrize("broken", [False, True])
def test_a_capture_that_fails_ends_with_its_own_error(cuda: Cuda, broken: bool) -> None:
    capturing = Capturing(GPU)
    cuda.broken = broken

    def run() -> None:
        if cuda.capturing:
            raise ZeroDivisionError("an unsupported operation")

    with pytest.raises(ZeroDivisionError, match="unsupported operation"):
        capturing.capture(run)
    assert not cuda.capturing
    cuda.broken, cuda.captures = False, 0
    assert capturing.capture(lambda: 3)() == 3


def test_a_device_is_not_lost_while_another_thread_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To wait for the whole device would fail then, and break the capture."""

    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    own = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: own)
    assert device_lost(GPU) is None
    own.synchronize = refuse
    lost = device_module.device_lost(GPU)
    assert isinstance(lost, device_module.DeviceLost)
