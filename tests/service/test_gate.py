"""Counting generations in flight."""

import asyncio
from contextlib import suppress

import pytest

from paceline.service import Gate, ServiceError


async def test_it_is_drained_when_the_last_one_left() -> None:
    gate = Gate()
    async with asyncio.timeout(60):
        await gate.drained()
    with gate.enter():
        with suppress(RuntimeError), gate.enter():
            assert gate.inside == 2
            raise RuntimeError
        gate.close()
        waiting = asyncio.create_task(gate.drained())
        await asyncio.sleep(0)
        assert gate.inside == 1
        assert not waiting.done()
    async with asyncio.timeout(60):
        await waiting
    assert gate.inside == 0


async def test_a_closed_one_lets_nothing_in() -> None:
    gate = Gate()
    gate.close()
    with pytest.raises(ServiceError) as caught, gate.enter():
        pytest.fail("it let us in")
    assert (caught.value.code.name, caught.value.reason) == ("UNAVAILABLE", "DRAINING")
    assert gate.inside == 0
