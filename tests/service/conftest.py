import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from calls import started, until
from certificates import Authority, Pair

from paceline.service import ServerOptions, run_server
from paceline.service.metrics import new_registry

from . import toy
from .toy import Toy

Serve = Callable[..., Awaitable["Served"]]


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Certificates of one authority, and a stranger's of another."""
    folder = tmp_path_factory.mktemp("pki")
    authority, other = Authority(folder / "own"), Authority(folder / "other")
    return {
        "authority": Pair(authority.cert, authority.cert),
        **{name: authority.sign(name) for name in ("server", "client", "colleague")},
        "stranger": other.sign("stranger"),
    }


@dataclass
class Served:
    toy: Toy
    address: str
    stop: asyncio.Event
    running: asyncio.Task[None]

    def channel(self, **options: Any) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address, options=list(options.items()))


@asynccontextmanager
async def served(options: ServerOptions) -> AsyncIterator[Served]:
    """Serve a toy for the body, over a real socket."""
    service, metrics = Toy(), new_registry() if options.metrics_address else None
    async with started(run_server, service, options, metrics=metrics) as server:
        yield Served(service, *server)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts toys with given ServerOptions; all are stopped after the test."""
    async with AsyncExitStack() as stack:

        async def start(address: str = "127.0.0.1:0", **options: Any) -> Served:
            return await stack.enter_async_context(served(ServerOptions(address, **options)))

        yield start


class ToyProcess:
    def __init__(self, folder: Path, drain: float, *start: str) -> None:
        self.diary = folder / "diary"
        self.diary.touch()
        self.ready = folder / "ready"
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, toy.__file__, "127.0.0.1:0", str(self.ready)),
                *(str(self.diary), str(drain), *start),
            ],
            stdout=self.log,
            stderr=self.log,
        )

    async def address(self) -> str:
        def ready() -> bool:
            assert self.process.poll() is None, "the toy died"
            return self.ready.exists() and bool(self.ready.read_text())

        await until(ready)
        return self.ready.read_text()

    async def noted(self, event: str) -> None:
        """Wait until the toy wrote this event into its diary."""
        await until(lambda: event in self.events())

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, 60)

    def events(self) -> list[str]:
        return self.diary.read_text().splitlines()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.fixture
def toy_process(tmp_path: Path) -> Iterator[Callable[..., ToyProcess]]:
    """Starts toy processes; those left are killed after the test."""
    started: list[ToyProcess] = []

    def start(drain: float = 30.0, *, hangs: bool = False) -> ToyProcess:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(ToyProcess(folder, drain, *(["hangs"] if hangs else [])))
        return started[-1]

    yield start
    for process in started:
        process.close()
