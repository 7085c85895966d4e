from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes.verifier import World, running

from paceline.client import Client, RetryOptions


@pytest.fixture
async def world(short_folder: Path) -> AsyncIterator[World]:
    async with running(short_folder) as world:
        yield world


QUICK = RetryOptions(budget=60, first_delay=0.005, max_delay=0.05)
"""Quick retries, of which there may be many."""


@pytest.fixture
async def client(world: World) -> AsyncIterator[Client]:
    async with Client(world.address, cache_dir=None, retry=QUICK) as client:
        yield client
