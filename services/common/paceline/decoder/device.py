"""Choice of a service's device."""

from __future__ import annotations

import logging
import re

import torch

logger = logging.getLogger("paceline.device")

_NAMES = re.compile(r"auto|cpu|cuda(:\d+)?")


def find_device(name: str, *, preferred: int = 0) -> torch.device:
    """An available device, with its index.

    Args:
        name: auto, cpu, cuda or cuda:N. auto is a GPU if PyTorch finds one, else the CPU; the
            choice is logged.
        preferred: Index of the GPU that auto chooses; the last one if there are fewer.

    Raises:
        ValueError: The name is not one of these, or there is no such device.
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
        raise ValueError(f"device is {name!r}, expected one of the {count} GPUs that PyTorch finds")
    return torch.device("cuda", number)


def _choose(count: int, preferred: int) -> torch.device:
    if not count:
        build = "" if torch.version.cuda else f", and {torch.__version__} is built without CUDA"
        logger.info("device auto: computing on the CPU, since PyTorch finds no GPU%s", build)
        return torch.device("cpu")
    device = torch.device("cuda", min(preferred, count - 1))
    logger.info("device auto: computing on %s, GPUs that PyTorch finds: %d", device, count)
    return device


def use_device(device: torch.device | str) -> None:
    """Make a GPU the current device of the calling thread, on which Triton launches kernels."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
