"""Two measurements at the same time on one machine, each in a lane with cores of its own.

A machine that others share is fast and slow in turns, by a tenth between one ten seconds and the
next: of two windows one after the other nobody can tell a difference of a few percent. Most of what
slows one core slows the other at the same time. What is left, a core that is slower than the other
for some ten seconds, shows when the lanes swap cores.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Worker = Callable[[Any], Awaitable[Any]]
"""Does what an order asks for."""

Setup = Callable[[], AbstractAsyncContextManager[Worker]]
"""Starts what a lane needs, and stops it. Has to be picklable, as orders and answers have."""

_LANES = 2


def shares() -> list[set[int]]:
    """The cores of this process in equal parts, one for each lane.

    Raises:
        RuntimeError: there are fewer cores than lanes.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // _LANES
    if not each:
        raise RuntimeError(
            f"{len(cores)} core for {_LANES} lanes: measure where each can have one of its own"
        )
    return [set(cores[place * each : (place + 1) * each]) for place in range(_LANES)]


class Lane(AbstractAsyncContextManager["Lane"]):
    """A process on some cores that does one piece of work after another.

    All that it starts runs on these cores too. It ends with the with-block, and with this process.
    """

    def __init__(self, cores: set[int], setup: Setup) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_run, args=(theirs, cores, setup))
        self._theirs = theirs

    async def __aenter__(self) -> Self:
        self._process.start()
        self._theirs.close()  # now the pipe ends when the process does
        await self._answer()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pipe.close()
        await asyncio.to_thread(self._process.join)

    async def do(self, order: Any) -> Any:
        """What came of an order.

        Raises:
            RuntimeError: the process is gone; it has told why on its stderr.
        """
        self._pipe.send(order)
        return await self._answer()

    def move(self, cores: set[int]) -> None:
        """Go on, with all that was started, on other cores."""
        assert self._process.pid is not None
        for pid in _family(self._process.pid):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), cores)

    async def _answer(self) -> Any:
        try:
            return await asyncio.to_thread(self._pipe.recv)
        except EOFError:
            raise RuntimeError("a lane's process died: see its traceback above") from None


def _family(pid: int) -> list[int]:
    """A process, its children, theirs, and so on."""
    parents: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family


def _run(pipe: Connection, cores: Sequence[int], setup: Setup) -> None:
    """A lane's process."""
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    asyncio.run(_serve(pipe, setup))


async def _serve(pipe: Connection, setup: Setup) -> None:
    async with setup() as work:
        pipe.send(None)
        while True:
            try:
                order = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            pipe.send(await work(order))
