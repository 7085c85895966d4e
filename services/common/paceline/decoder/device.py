"""Devices by name, and threads that compute on them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

logger = logging.getLogger("paceline.device")

# Types of devices besides the CPU, by their names in PyTorch; auto takes the first there is.
ACCELERATORS = ("cuda",)

_EXPECTED = ", ".join(["auto", "cpu", *(f"{kind} or {kind}:N" for kind in ACCELERATORS)])


def find_device(name: str, *, preferred: int = 0) -> torch.device:
    """The device of a name, with its number.

    Args:
        name: auto, cpu, cuda or cuda:N. auto is a GPU if PyTorch finds one, otherwise the CPU; the
            choice is logged.
        preferred: Number of the GPU that auto takes; the last one if there are fewer.

    Raises ``ValueError`` if the name is unknown, there is no such device, or the driver is too
    old for it.
    """
    if name == "auto":
        return _usable(_choose(preferred))
    if name == "cpu":
        return torch.device("cpu")
    kind, _, number = name.partition(":")
    if kind not in ACCELERATORS or not re.fullmatch(r"[a-z]+(:\d+)?", name):
        raise ValueError(f"device is {name!r}, expected {_EXPECTED}")
    count = _count(kind)
    if int(number or 0) >= count:
        raise ValueError(f"device is {name!r}, expected one of the {count} that PyTorch finds")
    return _usable(torch.device(kind, int(number or 0)))


def _usable(device: torch.device) -> torch.device:
    """The device; devices are counted without the driver that is needed to compute on them. Raises
    ValueError: the driver is too old."""
    if device.type == "cpu":
        return device
    try:
        torch.get_device_module(device).init()
    except RuntimeError as error:
        raise ValueError(
            f"{device} cannot be used: {error} PyTorch {torch.__version__} is built for CUDA "
            f"{torch.version.cuda}: update the NVIDIA driver, install PyTorch for an older CUDA "
            "(PIP_EXTRA_INDEX_URL with its index cu126), or use --device cpu"
        ) from error
    return device


def has_mps() -> bool:
    """Whether NVIDIA's multi-process service runs: without it, processes on one GPU take turns."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


def _choose(preferred: int) -> torch.device:
    for kind in ACCELERATORS:
        if count := _count(kind):
            device = torch.device(kind, min(preferred, count - 1))
            mps = "" if has_mps() else "; no MPS: services that share it take turns"
            logger.info("device auto: using %s, GPUs that PyTorch finds: %d%s", device, count, mps)
            return device
    build = "" if torch.version.cuda else f", and {torch.__version__} is built without CUDA"
    logger.info("device auto: using the CPU, since PyTorch finds no GPU%s", build)
    return torch.device("cpu")


def _count(kind: str) -> int:
    return int(torch.get_device_module(kind).device_count())


def use_device(device: torch.device | str) -> None:
    """Make a device the calling thread's current one, on which Triton launches its kernels."""
    device = torch.device(device)
    if device.type in ACCELERATORS:
        torch.get_device_module(device).set_device(device)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what the calling thread asked it to do."""
    if device.type in ACCELERATORS:
        torch.accelerator.current_stream(device).synchronize()


def receive(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies on the CPU of tensors of a device, after one wait for all that it was asked to do."""
    pinned = device.type == "cuda"
    copies = [
        torch.empty(each.shape, dtype=each.dtype, pin_memory=pinned).copy_(each, non_blocking=True)
        for each in tensors
    ]
    wait_for(device)
    return copies


class DeviceLost(Exception):
    """The device fails every call; only a new process can use it again."""


def map_on_cores(
    work: Callable[[int], T], numbers: Iterable[int], cores: int | None = None
) -> list[T]:
    """The results of work for some numbers, one on each core, where most of it runs on one thread;
    ``cores`` are as many as this process has threads for a step unless given."""
    threads = torch.get_num_threads()
    count = cores or threads
    with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        results = list(pool.map(work, numbers))
    torch.set_num_threads(threads)  # later threads begin with the newest setting of any
    return results


def device_lost(device: torch.device | str) -> DeviceLost | None:
    """The error if every call of an accelerator fails, as on a GPU after a fault in a kernel.

    Waits for the calling thread's own stream: while another thread captures a graph, to wait for
    the whole device is an error, which breaks the capture too.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return None
    try:
        torch.accelerator.current_stream(device).synchronize()
    except RuntimeError as error:
        return DeviceLost(f"{device} fails every call since an error in a kernel: {error}")
    return None
