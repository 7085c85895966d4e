"""CPUs that a process may keep busy: affinity, cores, NUMA nodes and quotas of control groups."""

import os
from pathlib import Path

import pytest

from paceline.service.cpus import default_threads, usable_cpus

V2 = "30 20 0:26 {shown} /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1 = "31 20 0:27 {shown} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct"
MEMORY = "32 20 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
HYBRID = "33 20 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("usable", "nodes", "siblings", "threads"),
    [
        (range(2), ["0-1"], {0: "0", 1: "1"}, 2),
        (range(8), ["0-7"], {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}, 4),
        (range(64), ["0-31", "32-63"], {}, 32),
        (
            range(128),
            ["0-31,64-95", "32-63,96-127"],
            {cpu: f"{cpu % 64},{cpu % 64 + 64}" for cpu in range(128)},
            32,
        ),
        ((0, 1, 40), ["0-31", "32-63"], {}, 2),
        ((5,), [], {}, 1),
        (range(4), ["damaged"], {0: "?"}, 4),
    ],
)
def test_one_thread_for_each_core_of_one_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, usable: range | tuple[int, ...],
    nodes: list[str], siblings: dict[int, str], threads: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(usable), raising=False)
    top = "sys/devices/system"
    write(tmp_path, {f"{top}/node/node{n}/cpulist": cpus for n, cpus in enumerate(nodes)})
    threads_of = "topology/thread_siblings_list"
    write(tmp_path, {f"{top}/cpu/cpu{n}/{threads_of}": text for n, text in siblings.items()})
    assert default_threads(tmp_path) == threads


def v1(folder: str, quota: str, period: str = "100000") -> dict[str, str]:
    top = f"sys/fs/cgroup/cpu,cpuacct/{folder}"
    return {f"{top}/cpu.cfs_quota_us": quota, f"{top}/cpu.cfs_period_us": period}


def v2(folder: str, text: str) -> dict[str, str]:
    return {f"sys/fs/cgroup/{folder}/cpu.max": text}


@pytest.mark.parametrize(
    ("mounts", "groups", "files", "cpus"),
    [
        ([V2], ["0::/"], v2("", "100000 100000"), 1),
        ([V2], ["0::/"], v2("", "max 100000"), 8),
        ([V2], ["0::/a"], v2("a", "250000 100000"), 2),
        ([V2], ["0::/a"], v2("a", "5000 100000"), 1),
        ([V2], ["0::/a"], v2("a", "99999999 100000"), 8),
        ([V2], ["0::/a/b/c"], v2("a", "300000 100000") | v2("a/b", "500000 100000"), 3),
        ([V2], ["0::/a/b/c"], v2("a", "max 100000") | v2("a/b/c", "400000 100000"), 4),
        ([V2], ["0::/a"], v2("other", "100000 100000"), 8),
        ([V2], ["0::/../other"], v2("", "200000 100000"), 2),
        ([V2], ["0::/pod/a"], v2("", "300000 100000"), 3),
        ([V2.replace("{shown}", "/pod")], ["0::/pod/a"], v2("a", "200000 100000"), 2),
        ([MEMORY, V1], ["5:memory:/m", "4:cpu,cpuacct:/a/b"], v1("a", "300000"), 3),
        ([MEMORY, V1], ["5:memory:/a", "4:cpu,cpuacct:/"], v1("a", "300000"), 8),
        ([V1], ["4:cpu,cpuacct:/a"], v1("a", "-1"), 8),
        ([V1], ["4:cpu,cpuacct:/a"], v1("a", "100000", "50000"), 2),
        ([V1], ["4:cpuacct,cpu:/a"], v1("a", "100000", "0"), 8),
        ([V1.replace("{shown}", "/docker/x")], ["4:cpu,cpuacct:/docker/x"], v1("", "200000"), 2),
        ([V1, HYBRID], ["4:cpu,cpuacct:/a", "0::/b"], v1("a", "600000"), 6),
        ([V1], ["4:cpu,cpuacct:/a"], v1("a", "damaged"), 8),
        (["damaged"], ["damaged"], v2("", "100000 100000"), 8),
        ([], [], v2("", "100000 100000"), 8),
    ],
)
def test_no_more_than_quotas_pay_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mounts: list[str], groups: list[str],
    files: dict[str, str], cpus: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    lines = "\n".join(each.replace("{shown}", "/") for each in mounts)
    write(tmp_path, {"proc/self/mountinfo": lines, "proc/self/cgroup": "\n".join(groups), **files})
    assert usable_cpus(tmp_path) == default_threads(tmp_path) == cpus
