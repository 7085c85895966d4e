"""What a drafter service is made of: readers of the verifiers' KV, the drafting thread, and the
registry of drafters; and the device of all three."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from paceline.drafter.methods.base import Drafter, Resources
from paceline.drafter.registry import Loader, Registry
from paceline.drafter.spec import DrafterSpec, Roots
from paceline.drafter.worker import DraftWorker
from paceline.service.runtime import trim

_device_log = logging.getLogger("paceline.device")


def drafting_worker(device: str, overlap: bool | None) -> DraftWorker:
    """Make the thread that drafts. ``overlap``: whether chains grow on while the verifier works;
    None: if ``device`` is a GPU, or where the verifier works on other cores."""
    if overlap is None and device != "cpu":
        overlap = True
    prepare, find_fault = _device_calls(device)
    return DraftWorker(prepare, overlap=overlap, find_fault=find_fault, device=device)


def drafter_registry(
    load: Sequence[DrafterSpec], roots: Sequence[Path], resources: Resources, worker: DraftWorker
) -> Registry:
    """Make the registry, without drafters. It closes them on the worker's thread, and loads from
    below ``roots``, or the folders of ``load`` and their parents."""
    folders = [folder for spec in load for folder in spec.folders]
    allowed = [*roots, *folders] if roots else [f for each in folders for f in (each, each.parent)]

    def dispose(drafter: Drafter) -> None:
        worker.post(drafter.close)
        # The sequence of a slow round may still refer to the drafter: memory is returned to the
        # system after the last reference is gone.
        weakref.finalize(drafter, worker.post, trim).atexit = False

    return Registry(Loader(Roots(allowed), resources), dispose, partial(worker.run, lambda: None))


def drafting_device(name: str) -> str:
    """Resolve a device name to the torch name of an existing device, with its number.

    Args:
        name: auto, cpu, cuda or cuda:N. auto is the second GPU if there are two, since a verifier
            on the same machine takes the first, and if the second can read the first's memory;
            else the first GPU, or the CPU.

    Raises ``ValueError`` if the name is malformed, or there is no such device.
    """
    # Drafters without weights need no torch, whose import takes seconds.
    if name == "cpu":
        return name
    if name == "auto" and not has_driver():
        _device_log.info("device auto: using the CPU, since there is no NVIDIA driver")
        return "cpu"
    from paceline.decoder import find_device

    device = find_device(name, preferred=1)
    if name == "auto" and device.index and (why := _why_unread(device.index)):
        _device_log.warning(
            "device auto: using cuda:0 after all, since %s %s: KV and hidden states of a verifier "
            "on cuda:0 would be copied over gRPC; --device %s takes it anyway (of `paceline serve`:"
            " --drafter-device)",
            device,
            why,
            device,
        )
        return str(find_device("cuda:0"))
    return str(device)


def _why_unread(gpu: int) -> str:
    """Says why a GPU is not known to read the memory of the first one; empty if it can."""
    from paceline.kv.cuda import DriverError, cuda_driver

    try:
        return "" if cuda_driver().reach(gpu, 0) else "has no peer access to its memory"
    except DriverError as error:
        return f"may have no peer access to its memory, which the driver does not tell: {error}"


def _device_calls(
    device: str,
) -> tuple[Callable[[], None] | None, Callable[[], Exception | None] | None]:
    """Functions that select a GPU on the calling thread, and check it; None for the CPU."""
    if device == "cpu":
        return None, None
    from paceline.decoder import device_lost, use_device

    return partial(use_device, device), partial(device_lost, device)


def has_driver() -> bool:
    """Whether there is an NVIDIA driver; it is not started."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
