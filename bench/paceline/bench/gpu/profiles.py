"""Profiles of the services of `rounds`: where the time of their threads and of the GPU goes.

A service whose PYTHONPATH begins with the folder of :func:`install` watches for trigger files. For
each it samples the stacks of its threads for a second, records the kernels of its device for
another, and appends both as text to a file.
"""

from __future__ import annotations

import collections
import os
import sys
import threading
import time
from pathlib import Path

HOST_SECONDS, DEVICE_SECONDS = 1.0, 0.6
SAMPLE_SECONDS = 0.0005
FRAMES, LINES = 5, 24


def install(folder: Path, service: str, trigger: Path, output: Path) -> dict[str, str]:
    """Make a folder for PYTHONPATH, and return the variables that its service needs besides.

    Args:
        service: A name for the head of each profile.
        trigger: Folder whose files each start a profile; a file's name is its label.
    """
    folder.mkdir()
    trigger.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"from {__name__} import start\n\nstart()\n")
    return {
        "PROFILED_SERVICE": service,
        "PROFILE_TRIGGER": str(trigger),
        "PROFILE_OUTPUT": str(output),
    }


def start() -> None:
    """Watch for triggers in a thread, if this process is a service to be profiled."""
    if "PROFILED_SERVICE" in os.environ:
        threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    trigger, output = (Path(os.environ[f"PROFILE_{name}"]) for name in ("TRIGGER", "OUTPUT"))
    done: set[str] = set()
    while True:
        time.sleep(0.02)
        for file in sorted(trigger.iterdir()):
            if file.name in done:
                continue
            done.add(file.name)
            head = f"{os.environ['PROFILED_SERVICE']}, {file.name}"
            for part in (_host, _device):
                try:
                    lines = part(head)
                except Exception as error:  # a profile must not end the service
                    lines = [f"## {head}: {type(error).__name__}: {error}"]
                with output.open("a") as profile:
                    profile.writelines(f"{line}\n" for line in lines)


def _host(head: str) -> list[str]:
    """Stacks of all other threads, by the share of samples."""
    own = threading.get_ident()
    counts: collections.Counter[str] = collections.Counter()
    samples, ends = 0, time.monotonic() + HOST_SECONDS
    while time.monotonic() < ends:
        time.sleep(SAMPLE_SECONDS)
        samples += 1
        for thread, frame in sys._current_frames().items():
            if thread == own:
                continue
            stack: list[str] = []
            at = frame
            while at is not None and len(stack) < FRAMES:
                code = at.f_code
                stack.append(f"{Path(code.co_filename).name}:{code.co_name}:{at.f_lineno}")
                at = at.f_back  # type: ignore[assignment]
            counts[" < ".join(stack)] += 1
    most = counts.most_common(LINES)
    return [
        f"## {head}: {samples} samples of the host",
        *(f"{100 * count / samples:5.1f}% {stack}" for stack, count in most),
    ]


def _device(head: str) -> list[str]:
    """Kernels by their total time; none without a GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        time.sleep(DEVICE_SECONDS)
    kernels = [(each.self_device_time_total, each.count, each.key) for each in found.key_averages()]
    total = sum(us for us, _, _ in kernels) / 1e3
    return [
        f"## {head}: {total:.1f} ms of kernels in {DEVICE_SECONDS * 1e3:.0f} ms",
        *(
            f"{us / 1e3:9.2f} ms {count:6d} x {us / max(1, count):8.1f} us {name[:90]}"
            for us, count, name in sorted(kernels, reverse=True)[:LINES]
        ),
    ]
