"""Whatever dies or breaks in the middle of a text, the text stays the same."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from proxy import Proxy
from system_support import make_prompts, shared_memory_segments

from paceline.cli.processes import ServiceProcess
from paceline.client import Client, DraftOptions

TOKENS = 96
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
SELFSPEC = {
    "mapped": "kv=map",
    "chosen": "kv=map,kv_policy=verified",
    "followed": "kv=follow,kv_policy=chunk_topk",
    "pages": "kv=follow,kv_policy=quest,kv_wire=int8",
}
"""Ways in which the target drafts for itself from its verifier's KV."""
DRAFTERS = ("lm", *SELFSPEC)


def verifier(models: dict[str, Path]) -> ServiceProcess:
    """A verifier that says so with its exit code if its books do not balance at the end."""
    arguments = ["--target", str(models["llama"]), "--dtype", "float32", "--lease-seconds", "5"]
    return ServiceProcess("verifier", arguments, environment=ENVIRONMENT)


def drafting(models: dict[str, Path]) -> ServiceProcess:
    loads = {"lm": f"lm:{models['small']}", "ngram": "ngram"}
    for name, way in SELFSPEC.items():
        loads[name] = f"selfspec:{models['llama']},context=24,{way}"
    arguments = [f"--load={name}={spec}" for name, spec in loads.items()]
    return ServiceProcess("drafter", arguments, environment=ENVIRONMENT)


async def outputs(
    client: Client,
    prompts: list[list[int]],
    drafters: Sequence[str],
    act: Callable[[], None] = lambda: None,
    after: int = 0,
) -> tuple[list[list[int]], Counter[str]]:
    """Sampled outputs of all prompts at once, drafters in turn, and what failed on the way.

    `act` (blocking) is called once, when `after` tokens have been produced in all.
    """
    reached = asyncio.Event()
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
            if produced >= after:
                reached.set()
        result = await generation
        assert result.token_ids == tokens
        return tokens, result.stats.fallbacks

    async def disturb() -> None:
        await reached.wait()
        await asyncio.to_thread(act)

    disturbance = asyncio.create_task(disturb())
    results = await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))
    await disturbance
    return [tokens for tokens, _ in results], sum((count for _, count in results), Counter())


async def test_drafter_killed_and_back(models: dict[str, Path]) -> None:
    """SIGKILL of the drafter in mid-generation, and its return, change no token."""
    prompts = make_prompts(6, seed=2)
    async with verifier(models) as served, drafting(models) as drafter:
        options = DraftOptions(first_delay=0.05)
        async with Client(served.address, drafter=drafter.address, drafting=options) as client:
            expected, _ = await outputs(client, prompts, ["none"])

            def kill_and_restart() -> None:
                drafter.kill()
                drafter.restart_same_address()

            output, failures = await outputs(client, prompts, DRAFTERS, kill_and_restart, after=60)
            assert output == expected
            assert failures
            again, failures = await outputs(client, prompts, DRAFTERS)
            assert again == expected
        assert served.terminate() == 0


@pytest.mark.parametrize("drafters", [["none"], DRAFTERS])
async def test_verifier_killed_and_back(drafters: Sequence[str], models: dict[str, Path]) -> None:
    """SIGKILL and restart of the verifier: prefilled again, same tokens, its segments swept."""
    prompts = make_prompts(6, seed=3)
    before = shared_memory_segments()
    async with verifier(models) as served, drafting(models) as drafter:
        async with Client(served.address, drafter=drafter.address) as client:
            expected, _ = await outputs(client, prompts, ["none"])

            def kill_and_restart() -> None:
                # Before it dies: afterwards any verifier that starts sweeps them.
                assert shared_memory_segments() - before, "it holds no segment when it dies"
                served.kill()
                served.restart_same_address()

            output, failures = await outputs(client, prompts, drafters, kill_and_restart, after=60)
            assert output == expected
            assert failures
        assert served.terminate() == 0
    assert shared_memory_segments() <= before


async def test_connections_dropped_and_delayed(models: dict[str, Path]) -> None:
    """Cut and slow connections to both services change no token."""
    prompts = make_prompts(6, seed=4)
    async with verifier(models) as served, drafting(models) as drafter:
        async with Client(served.address) as direct:
            expected, _ = await outputs(direct, prompts, ["none"])
        async with Proxy(served.address) as near, Proxy(drafter.address) as far:
            loop = asyncio.get_running_loop()
            async with Client(near.address, drafter=far.address) as client:
                for names in (["none"], DRAFTERS, ["ngram"]):
                    output, failures = await outputs(
                        client, prompts, names, lambda: loop.call_soon_threadsafe(near.cut), 60
                    )
                    assert output == expected
                    assert failures
                far.delay = 0.15
                output, _ = await outputs(
                    client, prompts, DRAFTERS, lambda: loop.call_soon_threadsafe(far.cut), 60
                )
                assert output == expected
                near.delay = far.delay = 0.01
                output, _ = await outputs(client, prompts, DRAFTERS)
                assert output == expected
        assert served.terminate() == 0


async def test_two_hundred_rough_generations(models: dict[str, Path]) -> None:
    """200 generations with cuts, cancellations and drafter deaths: no leak, books in order."""
    chance = random.Random(5)
    prompts = make_prompts(200, seed=5)
    before = shared_memory_segments()
    async with verifier(models) as served, drafting(models) as drafter:
        async with Client(served.address) as direct:
            expected, _ = await outputs(direct, prompts[:8], ["none"])
        async with Proxy(served.address) as near, Proxy(drafter.address) as far:
            async with Client(near.address, drafter=far.address) as client:
                done = asyncio.Event()

                async def unrest() -> None:
                    while not done.is_set():
                        await asyncio.sleep(chance.uniform(0.2, 0.6))
                        chance.choice((near, far, far)).cut()

                slots = asyncio.Semaphore(8)

                async def one(index: int) -> None:
                    async with slots:
                        generation = client.generate(
                            prompts[index],
                            max_new_tokens=TOKENS,
                            temperature=1.0,
                            seed=index,
                            drafter=("none", "ngram", *DRAFTERS)[index % (2 + len(DRAFTERS))],
                        )
                        if index % 4 == 3:
                            async for chunk in generation:
                                if chunk.token_ids and chance.random() < 0.2:
                                    break
                            await generation.aclose()
                        else:
                            result = await generation
                            assert len(result.token_ids) == TOKENS
                            if index < len(expected):
                                assert result.token_ids == expected[index]

                trouble = asyncio.create_task(unrest())
                await asyncio.gather(*(one(index) for index in range(len(prompts))))
                done.set()
                await trouble
        # A cache whose handle was lost with its connection lives as long as its lease.
        for _ in range(300):
            if shared_memory_segments() <= before:
                break
            await asyncio.sleep(0.1)
        assert shared_memory_segments() <= before
        assert served.terminate() == 0, served.log_tail()
