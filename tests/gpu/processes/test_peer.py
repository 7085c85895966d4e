"""Verifier and drafter on two GPUs: KV and hidden states are mapped, or followed without access."""

import os

import pytest
import torch
from gpu_services import demo_jobs, pair, require_services, write

pytestmark = pytest.mark.gpu

METHODS = ("longspec", "selfspec", "dspark")


@pytest.fixture
def second_alone(device: torch.device) -> dict[str, str]:
    """Environment of a drafter that sees the second GPU only."""
    require_services()
    if (count := torch.cuda.device_count()) < 2:
        pytest.skip(f"needs two GPUs, there are {count}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    return {"CUDA_VISIBLE_DEVICES": visible[1]}


async def test_kv_is_mapped_or_followed(second_alone: dict[str, str]) -> None:
    from paceline.cuda.memory import cuda_driver

    jobs = demo_jobs()
    with pair("cuda:0", "cuda:1", METHODS) as services:
        right = (await write(services, "none", jobs)).texts
        for name in METHODS:
            found = await write(services, name, jobs)
            assert found.texts == right, name
            assert found.drafted > 0, name
            assert (found.received == 0) == cuda_driver().reach(1, 0), name
    with pair("cuda:0", "cuda:0", METHODS, drafter_environment=second_alone) as services:
        for name in METHODS:
            found = await write(services, name, jobs)
            assert found.texts == right, name
            assert found.drafted > 0, name
            assert found.received > 0, name


async def test_mapping_is_refused_where_it_is_impossible(second_alone: dict[str, str]) -> None:
    jobs = demo_jobs()
    with pair(
        "cuda:0", "cuda:0", ["longspec"], kv="map", drafter_environment=second_alone
    ) as services:
        right = (await write(services, "none", jobs)).texts
        found = await write(services, "longspec", jobs)
    assert found.texts == right
    assert found.drafted == 0
