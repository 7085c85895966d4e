"""The cores that a service computes on by default."""

from __future__ import annotations

import os
from pathlib import Path

_SYSTEM = Path("/sys/devices/system")


def default_threads(system: Path = _SYSTEM) -> int:
    """Physical cores of one NUMA node among the CPUs that this process may use, at least 1.

    Two hardware threads of a core share its vector units. A step meets all threads some 250 times,
    and a second socket makes each meeting several times slower, while memory is written from the
    node of the thread that loads the model.

    Args:
        system: Where Linux describes nodes and CPUs.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    usable = os.sched_getaffinity(0)
    nodes = [_cpus(path / "cpulist") for path in system.glob("node/node[0-9]*")]
    here = max((usable & node for node in nodes), key=len, default=usable) or usable
    cores = {
        min(_cpus(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") & here, default=cpu)
        for cpu in here
    }
    return max(1, len(cores))


def _cpus(path: Path) -> set[int]:
    """CPUs of a list such as 0-3,8-11; none if the file cannot be read."""
    try:
        parts = [part.split("-") for part in path.read_text().strip().split(",")]
        return {cpu for part in parts for cpu in range(int(part[0]), int(part[-1]) + 1)}
    except (OSError, ValueError):
        return set()
