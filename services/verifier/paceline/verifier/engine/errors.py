"""What can go wrong with a job, besides a lack of memory, and with the device."""

from __future__ import annotations

import torch


class StepFailed(Exception):
    """A step could not be computed. Nothing of it was committed; it may be tried again."""


class DeviceLost(Exception):
    """The device fails every call: only a new process can use it again."""


class SequenceClosed(Exception):
    """The sequence was released while work on it was waiting."""


def device_lost(device: torch.device) -> bool:
    """Whether a GPU answers nothing any more: after a fault in a kernel every later call fails."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
