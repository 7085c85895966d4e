from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paceline.client import Client, DraftOptions, RetryOptions

from .world import World, running


@pytest.fixture
async def world(short_folder: Path) -> AsyncIterator[World]:
    async with running(short_folder) as world:
        yield world


def quick_client(world: World, *, adaptive: bool, timeout: float = 60.0) -> Client:
    """A client of both fakes that retries quickly, and gives trees `timeout` seconds."""
    return Client(
        *world.addresses,
        cache_dir=None,
        retry=RetryOptions(budget=60, first_delay=0.005, longest_delay=0.05),
        drafting=DraftOptions(
            timeout=timeout, first_delay=0.01, longest_delay=0.05, adaptive=adaptive
        ),
    )


@pytest.fixture
async def client(world: World) -> AsyncIterator[Client]:
    """A client that drafts where it pays."""
    async with quick_client(world, adaptive=True) as client:
        yield client


@pytest.fixture
async def eager(world: World) -> AsyncIterator[Client]:
    """A client that drafts in every round, and waits for each tree however busy the machine is."""
    async with quick_client(world, adaptive=False) as client:
        yield client
