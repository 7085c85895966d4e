"""Kernels are compiled before the passes that launch them, all at once."""

import gc
import logging

import pytest
import torch


def gate() -> torch.Tensor:
    from paceline.cuda.triton.backend import TritonRows

    return TritonRows().gate(torch.ones(2, 8))


def test_a_pass_that_only_compiles_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one that fails, which is reported and ends nothing."""
    from paceline.cuda.triton import backend
    from paceline.cuda.triton.ahead import compile_ahead

    wanted, found = gate(), []
    monkeypatch.setattr(backend.torch, "empty", torch.zeros)
    compile_ahead([lambda: found.append(gate())])
    assert torch.equal(found[0], torch.zeros_like(wanted))
    assert torch.equal(gate(), wanted)


def test_a_pass_that_fails_is_reported_and_the_next_one_compiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from paceline.cuda.triton.ahead import compile_ahead

    ran: list[bool] = []

    def fail() -> None:
        raise RuntimeError("the device has no memory")

    with caplog.at_level(logging.WARNING):
        compile_ahead([fail, lambda: ran.append(gc.isenabled())])
    assert ran == [False], "a collection would let two threads parse at once"
    assert gc.isenabled()
    assert "the device has no memory" in caplog.text
    assert gate().any(), "launches launch again"
