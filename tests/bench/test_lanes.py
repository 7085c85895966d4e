"""Lanes keep to their cores, swap them, and tell when they die."""

import os

import pytest
from lane_work import cores

from paceline.bench.lanes import Lane, shares

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


async def test_a_lane_and_what_it_started_keep_to_its_cores() -> None:
    mine, others = shares()
    assert not mine & others
    async with Lane(mine, cores) as lane:
        assert await lane.do("tell") == (mine, mine, str(len(mine)))
        lane.move(others)
        assert (await lane.do("tell"))[:2] == (others, others)


async def test_a_lane_that_dies_says_so() -> None:
    async with Lane(shares()[0], cores) as lane:
        with pytest.raises(RuntimeError, match="died"):
            await lane.do("fail")
