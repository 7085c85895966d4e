"""Verifier and drafter as processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.client import Client, DraftOptions
from paceline.harness import ServiceProcess
from paceline.kv.segment import NAME

ALWAYS = DraftOptions(timeout=20.0, adaptive=False)
"""Drafts in every round."""


@dataclass(frozen=True)
class Services:
    """Two running processes."""

    verifier: ServiceProcess
    drafter: ServiceProcess

    def client(self, drafting: DraftOptions | None = None) -> Client:
        """A client of both."""
        return Client(
            self.verifier.address, drafter_address=self.drafter.address, drafting=drafting
        )


@contextmanager
def services(
    target: Path,
    drafters: Mapping[str, str],
    weights: str,
    verifier: Sequence[str] = (),
    drafter: Sequence[str] = (),
    *,
    apart: bool = False,
) -> Iterator[Services]:
    """Start both services on the CPU for the body.

    Args:
        target: A Hugging Face folder.
        drafters: Specifications METHOD[:DIR][,KEY=VALUE...] by name.
        weights: Format of the target's weights.
        verifier: More arguments of the verifier.
        drafter: More arguments of the drafter.
        apart: Each service has one thread on a core of its own, as two devices would be: the
            verifier on the first core that this process may use, the drafter on the second.
    """
    pins: list[list[str]] = [[], []]
    if apart:
        pins = [["taskset", "--cpu-list", str(core)] for core in first_cores(2)]
    load = [
        argument for name, spec in drafters.items() for argument in ("--load", f"{name}={spec}")
    ]
    given = ["--device=cpu", "--target", str(target), "--weights", weights, *verifier]
    with (
        ServiceProcess("verifier", given, wrapper=pins[0]) as first,
        ServiceProcess(
            "drafter",
            ["--device=cpu", f"--verifier={first.address}", *load, *drafter],
            wrapper=pins[1],
        ) as second,
    ):
        yield Services(first, second)


def first_cores(count: int) -> list[int]:
    """The first cores that this process may use.

    Raises:
        ValueError: There are fewer than ``count``.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        raise ValueError(f"this process may use {len(cores)} cores, expected at least {count}")
    return cores[:count]


def kv_segments(*pids: int) -> list[str]:
    """The descriptors of KV segments that processes have open or mapped, as files in /proc."""
    found = []
    for pid in pids:
        with suppress(FileNotFoundError):  # it has ended
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    if os.readlink(file).startswith(f"/memfd:{NAME}"):
                        found.append(str(file))
    return found


def anonymous_bytes(pid: int) -> int:
    """Anonymous resident memory of a process, which a leak increases."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/status has no RssAnon")
