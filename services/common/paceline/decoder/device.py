"""Where a service computes: a device by its torch name, and threads that work on it."""

from __future__ import annotations

import logging
import re

import torch

logger = logging.getLogger("paceline.device")

_NAMES = re.compile(r"auto|cpu|cuda(:\d+)?")


def find_device(name: str, *, preferred: int = 0) -> torch.device:
    """A device that is there, its number included.

    Args:
        name: auto, cpu, cuda or cuda:N. auto is a GPU where PyTorch sees one and the CPU where it
            sees none, and logs which.
        preferred: Number of the GPU that auto takes; the last one where there are fewer.

    Raises:
        ValueError: The name is another, or there is no such device.
    """
    if not _NAMES.fullmatch(name):
        raise ValueError(f"device is {name!r}, expected auto, cpu, cuda or cuda:N")
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if name == "auto":
        return _choose(count, preferred)
    number = torch.device(name).index or 0
    if number >= count:
        raise ValueError(f"device is {name!r}, expected one of the {count} that PyTorch sees")
    return torch.device("cuda", number)


def _choose(count: int, preferred: int) -> torch.device:
    if not count:
        build = "" if torch.version.cuda else f", and {torch.__version__} is built without CUDA"
        logger.info("device auto: computing on the CPU, since PyTorch sees no GPU%s", build)
        return torch.device("cpu")
    device = torch.device("cuda", min(preferred, count - 1))
    logger.info("device auto: computing on %s, GPUs that PyTorch sees: %d", device, count)
    return device


def use_device(device: torch.device | str) -> None:
    """Make a device the calling thread's own: kernels of Triton are launched on that one."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
