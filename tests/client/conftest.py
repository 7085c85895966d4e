import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from paceline.client import Client, DraftOptions, RetryOptions
from paceline.client._pace import Pace

from .world import World, running


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder whose path is short enough for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        yield Path(folder)


@pytest.fixture
async def world(socket_folder: Path) -> AsyncIterator[World]:
    async with running(socket_folder) as world:
        yield world


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round asks for a tree, whatever the clock says."""
    monkeypatch.setattr(Pace, "steps", lambda self: 0)


@pytest.fixture
async def client(world: World) -> AsyncIterator[Client]:
    """A client of both fakes that retries quickly."""
    async with Client(
        *world.addresses,
        cache_dir=None,
        retry=RetryOptions(budget=10, first_delay=0.005, longest_delay=0.05),
        drafting=DraftOptions(timeout=0.5, first_delay=0.01, longest_delay=0.05),
    ) as client:
        yield client
