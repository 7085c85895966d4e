"""What a lane of the tests does. A module of its own: the lane's process has to import it."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline.bench.lanes import Worker


@asynccontextmanager
async def cores() -> AsyncIterator[Worker]:
    """Tells on which cores it runs, and on which a process that it started; or fails."""
    sleeper = await asyncio.create_subprocess_exec("sleep", "600")

    async def work(order: str) -> tuple[set[int], set[int], str]:
        if order == "fail":
            raise ValueError("as it was told")
        threads = os.environ["OMP_NUM_THREADS"]
        return os.sched_getaffinity(0), os.sched_getaffinity(sleeper.pid), threads

    try:
        yield work
    finally:
        sleeper.kill()
        await sleeper.wait()
