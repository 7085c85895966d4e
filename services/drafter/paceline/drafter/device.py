"""The device of a drafter service, chosen without importing torch if there can be no GPU."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import partial

logger = logging.getLogger("paceline.device")


def drafting_device(name: str) -> str:
    """Resolve a device name to the torch name of an existing device, with its number.

    Args:
        name: auto, cpu, cuda or cuda:N. auto is the second GPU if there are two, since a verifier
            on the same machine takes the first; else the only GPU, or the CPU.

    Raises:
        ValueError: The name is malformed, or there is no such device.
    """
    # Drafters without weights need no torch, whose import takes seconds.
    if name == "cpu":
        return name
    if name == "auto" and not _has_driver():
        logger.info("device auto: using the CPU, since there is no NVIDIA driver")
        return "cpu"
    from paceline.decoder import find_device

    return str(find_device(name, preferred=1))


def thread_setup(device: str) -> Callable[[], None] | None:
    """Function that selects a GPU on the calling thread; None for the CPU."""
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
