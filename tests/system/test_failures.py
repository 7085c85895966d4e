"""No failure of a process or connection changes a text."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from calls import eventually
from proxy import Proxy
from system_support import EAGER, THREADS, generate_and, make_prompts, open_segments, wait_joined

from paceline.client import Client, DraftOptions, RetryOptions
from paceline.harness import ServiceProcess

TOKENS = 96
AFTER = 60
CUT_EVERY = 250
SELFSPEC = {
    "mapped": "kv=map",
    "chosen": "kv=map,kv_policy=verified",
    "followed": "kv=follow,kv_policy=chunk_topk",
    "pages": "kv=follow,kv_policy=verified_pages",
}  # self-speculation with each source of KV
DRAFTERS = ("lm", *SELFSPEC)
Services = tuple[ServiceProcess, ServiceProcess]  # a verifier and a drafter that joins it


def loads(models: dict[str, Path], names: Sequence[str], prefix: str = "") -> list[str]:
    """Arguments that load drafters, with a prefix before their names."""
    specs = {"lm": f"lm:{models['small']}", "ngram": "ngram"}
    specs |= {n: f"selfspec:{models['llama']},context=24,{way}" for n, way in SELFSPEC.items()}
    return [f"--load={prefix}{name}={specs[name]}" for name in names]


def client_of(verifier: str, drafting: DraftOptions | None = None) -> Client:
    """One whose generations wait for their reader, and which waits for a restart."""
    return Client(verifier, drafting=drafting, retry=RetryOptions(budget=300), unread_chunks=2)


@pytest.fixture(scope="module")
def processes(models: dict[str, Path], sockets: Path) -> Iterator[Services]:
    """A verifier and a drafter that joins it, which run again after each test."""
    arguments = ["--target", str(models["llama"]), "--weights", "float32", "--lease-seconds", "5"]
    arguments.append("--no-prefix-caching")  # the KV of ended texts is freed at once
    drafting = [*loads(models, ("ngram", *DRAFTERS)), f"--verifier=unix:{sockets}/v"]
    with (
        ServiceProcess(
            "verifier", arguments, address=f"unix:{sockets}/v", environment=THREADS
        ) as verifier,
        ServiceProcess(
            "drafter", drafting, address=f"unix:{sockets}/d", environment=THREADS
        ) as drafter,
    ):
        yield verifier, drafter


@pytest.fixture
def services(processes: Services) -> Services:
    wait_joined(processes[0].address)
    return processes


def expect_integrity(verifier: ServiceProcess) -> None:
    """Its integrity check passes: its exit code is 0."""
    assert verifier.terminate() == 0, verifier.log_tail()
    verifier.start()


async def outputs(
    client: Client,
    prompts: list[list[int]],
    drafters: Sequence[str],
    act: Callable[[], None] = lambda: None,
    then: Callable[[], None] = lambda: None,
) -> tuple[list[list[int]], Counter[str]]:
    """Sampled outputs of all prompts at once, drafters in turn, and what failed on the way.

    After `AFTER` tokens in total, reading stops in the middle of the texts until `act` (blocking)
    is done. `then` (blocking) runs concurrently with the rest of them.
    """
    reached, acted = asyncio.Event(), asyncio.Event()
    produced = 0

    async def one(index: int, prompt: list[int]) -> tuple[list[int], Counter[str]]:
        nonlocal produced
        tokens: list[int] = []
        generation = client.generate(
            prompt,
            max_new_tokens=TOKENS,
            temperature=1.0,
            seed=index,
            drafter=drafters[index % len(drafters)],
        )
        async for chunk in generation:
            tokens += chunk.token_ids
            produced += len(chunk.token_ids)
            if produced >= AFTER:
                reached.set()
                await acted.wait()
        result = await generation
        assert result.token_ids == tokens
        return tokens, result.stats.fallbacks

    async def disturb() -> None:
        await reached.wait()
        await asyncio.to_thread(act)
        acted.set()
        await asyncio.to_thread(then)

    disturbance = asyncio.create_task(disturb())
    results = await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))
    await disturbance
    return [tokens for tokens, _ in results], sum((count for _, count in results), Counter())


async def test_drafter_killed_and_back(services: Services) -> None:
    """SIGKILL of the drafter in mid-generation, and its return, change no token."""
    verifier, drafter = services
    prompts = make_prompts(6, seed=2)
    async with client_of(verifier.address, EAGER) as client:
        expected, _ = await outputs(client, prompts, ["none"])
        output, failures = await outputs(client, prompts, DRAFTERS, drafter.kill, drafter.start)
        assert output == expected
        assert failures
        again, _ = await outputs(client, prompts, DRAFTERS)
        assert again == expected


async def test_a_drafter_stalls_while_it_maps_a_cache(services: Services) -> None:
    """The verifier frees the memory of an ended text that a stopped drafter still maps."""
    verifier, drafter = services
    (prompt,) = make_prompts(1, seed=7)
    before = open_segments(verifier.pid)
    impatient = DraftOptions(timeout=1, adaptive=False)
    async with client_of(verifier.address, impatient) as client:
        expected = await generate_and(client, prompt, "none", 256)

        def stall() -> None:
            os.kill(drafter.pid, signal.SIGSTOP)

        try:
            text = await generate_and(client, prompt, "mapped", 256, stall)
            await asyncio.to_thread(
                eventually, lambda: open_segments(verifier.pid) == before, "the memory is freed"
            )
        finally:
            os.kill(drafter.pid, signal.SIGCONT)
        assert text.token_ids == expected.token_ids


async def test_another_service_takes_over(services: Services, models: dict[str, Path]) -> None:
    """Two services have the same drafter; the one that drafts for a text is killed in it."""
    verifier, _ = services
    (prompt,) = make_prompts(1, seed=9)
    arguments = [*loads(models, ["lm"], "twin-"), f"--verifier={verifier.address}"]
    async with client_of(verifier.address, EAGER) as client:
        expected = await generate_and(client, prompt, "none", 256)
        async with ServiceProcess("drafter", arguments, environment=THREADS) as first:
            await asyncio.to_thread(wait_joined, verifier.address, 2)
            async with ServiceProcess("drafter", arguments, environment=THREADS) as second:
                await asyncio.to_thread(wait_joined, verifier.address, 3)

                def kill() -> None:
                    """Kill the service in use, and wait until it has left."""
                    joined = wait_joined(verifier.address, 3)
                    used = [s.sequences for s in joined if s.default_drafter == "twin-lm"]
                    assert sorted(used) == [0, 1]
                    (first, second)[used.index(1)].kill()
                    wait_joined(verifier.address, 2)
                    time.sleep(0.5)  # the sequence is opened again after a tenth of a second

                result = await generate_and(client, prompt, "twin-lm", 256, kill)
    assert result.token_ids == expected.token_ids
    assert result.stats.fallbacks["drafter_unavailable"] == 1
    rounds = result.stats.rounds
    assert any(entry.drafted for entry in rounds[len(rounds) // 2 :])


@pytest.mark.parametrize("count", [16, pytest.param(200, marks=pytest.mark.slow)])
async def test_many_rough_generations(
    count: int, services: Services, models: dict[str, Path], sockets: Path
) -> None:
    """Generations with cuts, cancellations and lost drafters: no leak."""
    verifier, _ = services
    chance = random.Random(5)
    prompts = make_prompts(count, seed=5)
    before = open_segments()
    async with Client(verifier.address) as direct:
        expected, _ = await outputs(direct, prompts[:8], ["none"])
    rough = sockets / "rough"
    far = [*loads(models, ("ngram", *DRAFTERS), "far-"), f"--verifier=unix:{rough}"]
    async with (
        Proxy(verifier.address) as near,
        Proxy(verifier.address, path=rough) as link,
        ServiceProcess("drafter", far, address=f"unix:{sockets}/far", environment=THREADS),
    ):
        await asyncio.to_thread(wait_joined, verifier.address, 2)
        names = ("none", *(f"far-{name}" for name in ("ngram", *DRAFTERS)))
        async with Client(near.address, drafting=EAGER) as client:
            slots = asyncio.Semaphore(8)
            produced = cuts = 0

            async def one(index: int) -> None:
                nonlocal produced, cuts
                generation = client.generate(
                    prompts[index],
                    max_new_tokens=TOKENS,
                    temperature=1.0,
                    seed=index,
                    drafter=names[index % len(names)],
                )
                async for chunk in generation:
                    produced += len(chunk.token_ids)
                    if produced > CUT_EVERY * (cuts + 1):
                        cuts += 1
                        chance.choice((near, link, link)).cut()
                    if index % 4 == 3 and chunk.token_ids and chance.random() < 0.2:
                        await generation.aclose()
                        return
                result = await generation
                assert len(result.token_ids) == TOKENS
                if index < len(expected):
                    assert result.token_ids == expected[index]

            async def in_turn(index: int) -> None:
                async with slots:
                    await one(index)

            await asyncio.gather(*(in_turn(index) for index in range(len(prompts))))
            assert cuts >= count // 4
    # A cache whose handle was lost with its connection is kept until its lease ends.
    await asyncio.to_thread(
        eventually, lambda: open_segments() <= before, "all segments are removed"
    )
    expect_integrity(verifier)


@pytest.mark.parametrize("drafters", [pytest.param(["none"], marks=pytest.mark.slow), DRAFTERS])
async def test_verifier_killed_and_back(drafters: Sequence[str], services: Services) -> None:
    """SIGKILL and restart of the verifier: prefilled again, same tokens, its segments removed."""
    verifier, _ = services
    prompts = make_prompts(6, seed=3)
    before = open_segments()

    def kill() -> None:
        assert open_segments() - before, "it has no segment when it is killed"
        verifier.kill()

    async with client_of(verifier.address) as client:
        expected, _ = await outputs(client, prompts, ["none"])
        output, failures = await outputs(client, prompts, drafters, kill, verifier.start)
        assert output == expected
        assert failures
    expect_integrity(verifier)
    assert open_segments() <= before
