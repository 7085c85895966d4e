"""Errors of jobs and of the device."""

from __future__ import annotations

import torch


class StepFailed(Exception):
    """A step could not be computed. It committed nothing; the job may be repeated."""


class DeviceLost(Exception):
    """The device fails every call; only a new process can use it again."""


class SequenceClosed(Exception):
    """The sequence was released while a job of it waited."""


def device_lost(device: torch.device) -> bool:
    """Whether every call of an accelerator fails, as on a GPU after a fault in a kernel."""
    if device.type == "cpu":
        return False
    try:
        torch.accelerator.synchronize(device)
    except RuntimeError:
        return True
    return False
