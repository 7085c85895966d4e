"""Kernels for NVIDIA GPUs in Triton. The modules are imported where they run or are compiled."""

from __future__ import annotations

import logging
from functools import cache

import torch

logger = logging.getLogger("paceline.kernels")


def runs_on(device: torch.device | str) -> bool:
    """Whether a device runs these kernels; "meta" stands for a GPU that is not there."""
    return torch.device(device).type in ("cuda", "meta") and is_installed()


@cache
def is_installed() -> bool:
    """Whether Triton can be imported. The first call decides, and logs why it cannot.

    Only Triton itself may be missing: an ImportError in a module of this package is a fault, which
    must not become a slow GPU.
    """
    try:
        import triton  # noqa: F401
    except ImportError as error:
        logger.warning(
            "Triton cannot be imported (%s): a GPU runs operations of PyTorch, which takes "
            "many times as long; install paceline[cuda]",
            error,
        )
        return False
    return True
