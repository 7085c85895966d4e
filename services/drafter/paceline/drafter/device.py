"""Where the drafters of a service compute, found without torch where there can be no GPU."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import partial

logger = logging.getLogger("paceline.device")


def drafting_device(name: str) -> str:
    """The torch name of a device that is there, its number included.

    Args:
        name: auto, cpu, cuda or cuda:N. auto is the second GPU where there are two, since a
            verifier beside it takes the first; else the only one, or the CPU.

    Raises:
        ValueError: The name is another, or there is no such device.
    """
    # Drafters without weights need no torch, and importing it takes seconds and memory.
    if name == "cpu":
        return name
    if name == "auto" and not _has_driver():
        logger.info("device auto: computing on the CPU, since there is no NVIDIA driver")
        return "cpu"
    from paceline.decoder import find_device

    return str(find_device(name, preferred=1))


def thread_setup(device: str) -> Callable[[], None] | None:
    """What the drafting thread does first; None on the CPU, which need not be chosen."""
    if device == "cpu":
        return None
    from paceline.decoder import use_device

    return partial(use_device, device)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
