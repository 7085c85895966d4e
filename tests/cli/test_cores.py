"""Default threads on described machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.cli.service_process import default_threads


def describe(root: Path, nodes: list[str], siblings: dict[int, str]) -> Path:
    for number, cpus in enumerate(nodes):
        (root / f"node/node{number}").mkdir(parents=True)
        (root / f"node/node{number}/cpulist").write_text(cpus + "\n")
    for cpu, text in siblings.items():
        (root / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
        (root / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(text + "\n")
    return root


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
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    usable: range | tuple[int, ...],
    nodes: list[str],
    siblings: dict[int, str],
    threads: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(usable), raising=False)
    assert default_threads(describe(tmp_path, nodes, siblings)) == threads
