"""End to end on one GPU: every method's texts are those of the CPU, also if a service is killed."""

import asyncio

import pytest
import torch
from gpu_services import METHODS, Job, Pair, demo_jobs, pair, require_services, write

pytestmark = pytest.mark.gpu

LONG_TOKENS = 200
KEPT_BYTES = 64 << 20  # by the driver, for a while after a process ended


@pytest.fixture(scope="module")
def expected(cuda: torch.device) -> tuple[list[list[int]], list[int]]:
    """Texts of all jobs, and a long one of the first, by services on the CPU without drafting."""
    require_services()
    jobs = demo_jobs()
    with pair("cpu", "cpu", ["ngram"]) as services:
        texts = asyncio.run(write(services, "none", jobs)).texts
        return texts, asyncio.run(write(services, "none", jobs[:1], LONG_TOKENS)).texts[0]


async def test_every_method_and_deaths(
    device: torch.device, expected: tuple[list[list[int]], list[int]]
) -> None:
    torch.zeros(1, device=device)
    free = torch.cuda.mem_get_info()[0]
    jobs = demo_jobs()
    with pair(str(device), str(device), METHODS) as services:
        for name in ("none", *METHODS):
            found = await write(services, name, jobs)
            assert found.texts == expected[0], name
            assert bool(found.drafted) == (name != "none"), name
            assert found.received == 0, f"{name}: KV was sent, not mapped"
        for kind in ("drafter", "verifier"):
            await check_kill(services, kind, jobs[0], expected[1])
    assert free - torch.cuda.mem_get_info()[0] < KEPT_BYTES, "GPU memory was not freed"


async def test_a_drafter_on_the_cpu_follows_kv(
    device: torch.device, expected: tuple[list[list[int]], list[int]]
) -> None:
    with pair(str(device), "cpu", ["longspec"]) as services:
        found = await write(services, "longspec", demo_jobs())
    assert found.texts == expected[0]
    assert found.drafted > 0
    assert found.received > 0


async def check_kill(services: Pair, kind: str, job: Job, right: list[int]) -> None:
    """Kill a process during a text: the text continues, and so does the other process."""
    process, other = services.drafter, services.verifier
    if kind == "verifier":
        process, other = other, process
    restart: asyncio.Task[None] | None = None
    tokens: list[int] = []
    async with services.client() as client:
        async for chunk in client.generate(
            job.prompt,
            max_new_tokens=len(right),
            temperature=job.temperature,
            seed=job.seed,
            drafter="longspec",
            ignore_eos=True,
        ):
            tokens += chunk.token_ids
            if restart is None and len(tokens) > 20:
                process.kill()
                restart = asyncio.create_task(asyncio.to_thread(process.start))
        assert restart is not None
        await restart
        async with asyncio.timeout(60):
            while "longspec" not in await client.drafters():  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.1)
    assert tokens == right, f"{kind} killed"
    assert other.returncode is None, f"{kind} killed: the other process ended too"
    found = await write(services, "longspec", [job], len(right))
    assert found.texts == [right], f"after the {kind}'s death"
    assert found.drafted > 0, f"after the {kind}'s death"
    assert found.received == 0, f"after the {kind}'s death KV is not mapped"
