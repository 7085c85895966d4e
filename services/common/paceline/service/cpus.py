"""How many CPUs this process may keep busy: the one place that asks. Imports no torch."""

from __future__ import annotations

import os
from contextlib import suppress
from math import inf
from pathlib import Path

_QUOTA_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""Of both versions of control groups: microseconds of processor time in a period, and the period.
Without a quota they say max, or -1."""


def usable_cpus(root: Path = Path("/")) -> int:
    """Return how many CPUs the process's affinity has, or its control groups pay for, at least 1.

    ``root`` is where Linux's ``proc`` and ``sys`` are.
    """
    return max(1, int(min(len(_affinity()), _quota(root))))


def default_threads(root: Path = Path("/")) -> int:
    """Return physical cores of one NUMA node among the CPUs that this process may use, or as many
    as its control groups pay for, at least 1.

    Two hardware threads of a core share its vector units. A step meets all threads some 250 times,
    and a second socket makes each meeting several times slower, while memory is written from the
    node of the thread that loads the model. Beyond a quota all threads stand still for the rest of
    its period. ``root`` is where Linux's ``proc`` and ``sys`` are.
    """
    usable, system = _affinity(), root / "sys/devices/system"
    nodes = [_cpus(path / "cpulist") for path in system.glob("node/node[0-9]*")]
    here = max((usable & node for node in nodes), key=len, default=usable) or usable
    cores = {
        min(_cpus(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") & here, default=cpu)
        for cpu in here
    }
    return max(1, int(min(len(cores), _quota(root))))


def _affinity() -> set[int]:
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    return os.sched_getaffinity(0)


def _quota(root: Path) -> float:
    """Return the fewest CPUs that a control group of the process or one around it grants."""
    quota = inf
    with suppress(OSError, ValueError):
        groups = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup")]
        for line in _lines(root / "proc/self/mountinfo"):
            fields, (kind, _, options) = (part.split() for part in line.split(" - "))
            shown, mount = fields[3:5]
            controller = {"cgroup": "cpu", "cgroup2": ""}.get(kind)
            if controller is None or controller not in ["", *options.split(",")]:
                continue
            for path in (path for _, names, path in groups if controller in names.split(",")):
                top = root / mount.lstrip("/")
                # A container may see a part of the tree only, and its path there or in all of it.
                below = path.removeprefix(shown).lstrip("/")
                group = top / below
                while group.is_relative_to(top):
                    quota = min(quota, _quota_of(group))
                    group = group.parent
    return quota


def _quota_of(group: Path) -> float:
    for names in _QUOTA_FILES:
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = " ".join((group / name).read_text() for name in names).split()
            if int(quota) > 0:
                return int(quota) / int(period)
    return inf


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _cpus(path: Path) -> set[int]:
    """Return the CPUs of a list such as 0-3,8-11; none if the file cannot be read."""
    try:
        parts = [part.split("-") for part in path.read_text().strip().split(",")]
        return {cpu for part in parts for cpu in range(int(part[0]), int(part[-1]) + 1)}
    except (OSError, ValueError):
        return set()
