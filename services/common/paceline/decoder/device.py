"""Where a service computes: a device by its torch name, and threads that work on it."""

from __future__ import annotations

import re

import torch

_NAMES = re.compile(r"cpu|cuda(:\d+)?")


def find_device(name: str) -> torch.device:
    """A device that is there, its number included.

    Args:
        name: cpu, cuda or cuda:N.

    Raises:
        ValueError: The name is another, or there is no such device.
    """
    if not _NAMES.fullmatch(name):
        raise ValueError(f"device is {name!r}, expected cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    number = device.index or 0
    if number >= count:
        raise ValueError(f"device is {name!r}, expected one of the {count} that PyTorch sees")
    return torch.device("cuda", number)


def use_device(device: torch.device | str) -> None:
    """Make a device the calling thread's own: kernels of Triton are launched on that one."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
