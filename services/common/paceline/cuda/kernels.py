"""Which kernels a GPU runs: Triton's, or attention of flash-attn."""

from __future__ import annotations

import logging
import os
from importlib import import_module

import torch

from paceline.kernels import DeviceKernels, kernels_for

logger = logging.getLogger("paceline.kernels")
BACKENDS = ("triton", "flash_attn")  # packages that attend on GPUs
VARIABLE = "PACELINE_ATTENTION"
MIN_CAPABILITY = (8, 0)


def load_kernels() -> DeviceKernels:
    """Return the kernels of the GPUs here; warns of one that is too old."""
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        logger.warning(
            "%s has compute capability %d.%d: below 8.0 the attention kernels have no tensor cores "
            "for bfloat16 and spill most of their registers, so steps take many times as long; "
            "use a GPU from Ampere on, or --device cpu", torch.cuda.get_device_name(), *capability,
        )  # fmt: skip
    return cuda_kernels(preferred_backend())


def cuda_kernels(name: str) -> DeviceKernels:
    """Return the kernels of NVIDIA GPUs, with attention by one of ``BACKENDS``, or by Triton if its
    package is missing, which is logged. Raises ``RuntimeError``: Triton cannot be imported. An
    ImportError in a module of this package is raised as it is."""
    try:
        import_module("triton")
    except ImportError as error:
        raise RuntimeError(
            f"a GPU needs Triton, which cannot be imported ({error}): install paceline[cuda], or "
            "use --device cpu"
        ) from error
    from paceline.cuda.triton.kernels import TritonKernels

    if name != "flash_attn":
        return TritonKernels()
    try:
        import_module("flash_attn")
    except ImportError as error:
        logger.warning("%s is flash_attn: Triton attends, since %s", VARIABLE, error)
        return TritonKernels()
    from paceline.cuda.triton.flash import FlashAttention2

    return FlashAttention2()


def preferred_backend() -> str:
    """Return what attends on GPUs: ``PACELINE_ATTENTION``, else Triton. Raises ``RuntimeError``:
    ``PACELINE_ATTENTION`` is not one of ``BACKENDS``."""
    requested = os.environ.get(VARIABLE) or BACKENDS[0]
    if requested not in BACKENDS:
        raise RuntimeError(f"{VARIABLE} is {requested!r}, expected one of {', '.join(BACKENDS)}")
    return requested


def why_bits_vary(device: torch.device) -> str:
    """Return why a row of attention may have other bits in a batch, a chain, a tree or a prompt
    than alone behind its committed path; empty if it has the same.

    That is what the Triton kernels promise, for all models that they serve: sliding
    windows, sinks, recorded scores, any group of heads and any width, and any cut of a prompt. They
    do not promise it for the recorded scores themselves, from which drafters choose KV, and for
    trees whose paths only the device knows, as they are while drafters grow them.
    """
    if kernels_for(device).name != "flash_attn":
        return ""
    return f"flash-attn, chosen by {VARIABLE}, adds up prompts in an order of its own"
