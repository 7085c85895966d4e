"""Verifier and drafter as processes, and a verifier in this process."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.client import Client, DraftOptions
from paceline.harness import ServiceProcess
from paceline.kv.segment import NAME

if TYPE_CHECKING:
    from paceline.verifier import VerifierService

ALWAYS = DraftOptions(timeout=20.0, adaptive=False)  # drafts in every round


@dataclass(frozen=True)
class Services:
    verifier: ServiceProcess
    drafter: ServiceProcess

    def client(self, drafting: DraftOptions | None = None) -> Client:
        return Client(self.verifier.address, drafting=drafting)


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


@asynccontextmanager
async def serving(
    service: VerifierService, drafters: Mapping[str, str]
) -> AsyncIterator[tuple[str, ServiceProcess | None]]:
    """Serve a verifier from this process, and start a drafter that joins it; yields the verifier's
    address and the drafter, which is None if there are no ``drafters``."""
    from paceline.service import ServerOptions, run_server  # not on a GPU machine

    stop = asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    drafter: ServiceProcess | None = None
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        address = f"unix:{folder}/v"
        options = ServerOptions(address=address, drain_seconds=10.0)
        server = asyncio.create_task(
            run_server(service, options, on_ready=ready.set_result, stop_event=stop)
        )
        starting: list[asyncio.Future[Any]] = [ready, server]
        await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
        try:
            if drafters:
                loads = [f"--load={name}={spec}" for name, spec in drafters.items()]
                arguments = ["--device=cpu", f"--verifier={address}", *loads]
                drafter = ServiceProcess("drafter", arguments)
                await asyncio.to_thread(drafter.start)
                while not service.joined():  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0.01)
            yield address, drafter
        finally:
            if drafter is not None:
                await asyncio.to_thread(drafter.stop)
            stop.set()
            await server


def first_cores(count: int) -> list[int]:
    """Return the first cores that this process may use. Raises ``ValueError`` if there are fewer
    than ``count``."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        raise ValueError(f"this process may use {len(cores)} cores, expected at least {count}")
    return cores[:count]


def kv_segments(*pids: int) -> list[str]:
    """Return the files in /proc of KV segments that processes have open or mapped."""
    segments = []
    for pid in pids:
        with suppress(FileNotFoundError):  # it has ended
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    if os.readlink(file).startswith(f"/memfd:{NAME}"):
                        segments.append(str(file))
    return segments


def anonymous_bytes(pid: int) -> int:
    """Return anonymous resident memory of a process, which a leak increases."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/status has no RssAnon")
