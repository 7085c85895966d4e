"""No failure of a process or connection changes a text."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from proxy import Proxy
from system_support import EAGER, THREADS, generate_and, make_prompts, shared_memory_segments

from paceline.client import Client, DraftOptions, RetryOptions
from paceline.drafter.kv.access import VerifierAccess
from paceline.drafter.kv.errors import KvGone
from paceline.drafter.kv.exchange import KvExchange
from paceline.harness import ServiceProcess

TOKENS = 96
AFTER = 60
CUT_EVERY = 250
SELFSPEC = {
    "mapped": "kv=map",
    "chosen": "kv=map,kv_policy=verified",
    "followed": "kv=follow,kv_policy=chunk_topk",
    "pages": "kv=follow,kv_policy=quest,kv_wire=int8",
}
"""Self-speculation with each source of KV."""
DRAFTERS = ("lm", *SELFSPEC)


def client_of(verifier: str, drafter: str, drafting: DraftOptions | None = None) -> Client:
    """One whose generations wait for their reader, and which waits for a restart."""
    return Client(
        verifier,
        drafter=drafter,
        drafting=drafting,
        retry=RetryOptions(budget=300),
        unread_chunks=2,
    )


@pytest.fixture(scope="module")
def services(
    models: dict[str, Path], sockets: Path
) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    """A verifier and a drafter, which run again after each test."""
    arguments = ["--target", str(models["llama"]), "--weights", "float32", "--lease-seconds", "5"]
    arguments.append("--no-prefix-caching")  # the KV of ended texts is freed at once
    loads = {"lm": f"lm:{models['small']}", "ngram": "ngram"}
    for name, way in SELFSPEC.items():
        loads[name] = f"selfspec:{models['llama']},context=24,{way}"
    drafting = [f"--load={name}={spec}" for name, spec in loads.items()]
    with (
        ServiceProcess(
            "verifier", arguments, address=f"unix:{sockets}/v", environment=THREADS
        ) as verifier,
        ServiceProcess(
            "drafter", drafting, address=f"unix:{sockets}/d", environment=THREADS
        ) as drafter,
    ):
        yield verifier, drafter


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


async def test_drafter_killed_and_back(services: tuple[ServiceProcess, ServiceProcess]) -> None:
    """SIGKILL of the drafter in mid-generation, and its return, change no token."""
    verifier, drafter = services
    prompts = make_prompts(6, seed=2)
    async with client_of(verifier.address, drafter.address, EAGER) as client:
        expected, _ = await outputs(client, prompts, ["none"])
        output, failures = await outputs(client, prompts, DRAFTERS, drafter.kill, drafter.start)
        assert output == expected
        assert failures
        again, _ = await outputs(client, prompts, DRAFTERS)
        assert again == expected


async def test_a_drafter_stalls_while_it_maps_a_cache(
    services: tuple[ServiceProcess, ServiceProcess],
) -> None:
    """The verifier frees the memory of an ended text that a stopped drafter still maps."""
    verifier, drafter = services
    (prompt,) = make_prompts(1, seed=7)
    before = shared_memory_segments()
    impatient = DraftOptions(first_delay=0.01, longest_delay=0.05, adaptive=False)
    async with client_of(verifier.address, drafter.address, impatient) as client:
        expected = await generate_and(client, prompt, "none", 256)

        def stall() -> None:
            os.kill(drafter.pid, signal.SIGSTOP)

        try:
            text = await generate_and(client, prompt, "mapped", 256, stall)
            assert shared_memory_segments() == before
        finally:
            os.kill(drafter.pid, signal.SIGCONT)
        assert text.token_ids == expected.token_ids


async def test_a_mapping_outlives_its_verifier(
    services: tuple[ServiceProcess, ServiceProcess],
) -> None:
    verifier, _ = services
    (prompt,) = make_prompts(1, seed=8)
    async with Client(verifier.address) as client:
        kept = client.generate(prompt, max_new_tokens=1, keep_cache=True)
        await kept
        assert kept._verifier is not None
        exchange = KvExchange(VerifierAccess())
        kv = await exchange.map_cache(verifier.address, kept._verifier.cache.read_grant, (0, -1))
        await exchange.close()
        kv.check()
        keys, _ = kv.layer(-1)
        assert kv.committed == len(prompt)
        copy = keys[:, : kv.committed].clone()
        verifier.kill()
        with pytest.raises(KvGone, match="verifier of the cache has ended"):
            kv.check()
        verifier.start()  # it sweeps what the dead one left
    assert kv.committed == len(prompt)
    assert keys[:, : kv.committed].equal(copy)
    kv.close()


async def test_connections_dropped_and_delayed(
    services: tuple[ServiceProcess, ServiceProcess],
) -> None:
    """Cut and slow connections to both services change no token."""
    verifier, drafter = services
    prompts = make_prompts(6, seed=4)
    async with Client(verifier.address) as direct:
        expected, _ = await outputs(direct, prompts, ["none"])
    async with Proxy(verifier.address) as near, Proxy(drafter.address) as far:
        loop = asyncio.get_running_loop()
        async with client_of(near.address, far.address) as client:
            for names in (["none"], DRAFTERS, ["ngram"]):
                output, failures = await outputs(
                    client, prompts, names, lambda: loop.call_soon_threadsafe(near.cut)
                )
                assert output == expected
                assert failures
            far.delay = 0.15
            output, _ = await outputs(
                client, prompts, DRAFTERS, lambda: loop.call_soon_threadsafe(far.cut)
            )
            assert output == expected
            near.delay = far.delay = 0.01
            output, _ = await outputs(client, prompts, DRAFTERS)
            assert output == expected
    expect_integrity(verifier)


async def test_a_bad_link_between_drafter_and_verifier(
    services: tuple[ServiceProcess, ServiceProcess], models: dict[str, Path]
) -> None:
    """A drafter that follows KV over a slow link, which breaks, goes down and comes back."""
    verifier, _ = services
    prompts = make_prompts(3, seed=4)
    names = [name for name, way in SELFSPEC.items() if "kv=follow" in way]
    loads = [f"--load={n}=selfspec:{models['llama']},context=24,{SELFSPEC[n]}" for n in names]
    loop = asyncio.get_running_loop()
    async with Proxy(verifier.address) as link:
        arguments = [*loads, "--kv-address", link.address]
        async with (
            ServiceProcess("drafter", arguments, environment=THREADS) as drafter,
            client_of(verifier.address, drafter.address, EAGER) as client,
        ):
            expected, _ = await outputs(client, prompts, ["none"])

            def go_down() -> None:
                link.down = True
                loop.call_soon_threadsafe(link.cut)

            link.delay = 0.02
            assert await outputs(client, prompts, names) == (expected, {})
            output, _ = await outputs(client, prompts, names, go_down)
            assert output == expected
            output, failures = await outputs(client, prompts, names)
            assert output == expected
            assert failures
            link.down = False
            output, _ = await outputs(client, prompts, names)
            assert output == expected


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
async def test_many_rough_generations(
    count: int, services: tuple[ServiceProcess, ServiceProcess]
) -> None:
    """Generations with cuts, cancellations and lost drafters: no leak."""
    verifier, drafter = services
    chance = random.Random(5)
    prompts = make_prompts(count, seed=5)
    before = shared_memory_segments()
    async with Client(verifier.address) as direct:
        expected, _ = await outputs(direct, prompts[:8], ["none"])
    async with Proxy(verifier.address) as near, Proxy(drafter.address) as far:
        async with Client(near.address, drafter=far.address) as client:
            slots = asyncio.Semaphore(8)
            produced = cuts = 0

            async def one(index: int) -> None:
                nonlocal produced, cuts
                generation = client.generate(
                    prompts[index],
                    max_new_tokens=TOKENS,
                    temperature=1.0,
                    seed=index,
                    drafter=("none", "ngram", *DRAFTERS)[index % (2 + len(DRAFTERS))],
                )
                async for chunk in generation:
                    produced += len(chunk.token_ids)
                    if produced > CUT_EVERY * (cuts + 1):
                        cuts += 1
                        chance.choice((near, far, far)).cut()
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
    async with asyncio.timeout(120):
        while not shared_memory_segments() <= before:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    expect_integrity(verifier)


@pytest.mark.parametrize("drafters", [pytest.param(["none"], marks=pytest.mark.slow), DRAFTERS])
async def test_verifier_killed_and_back(
    drafters: Sequence[str], services: tuple[ServiceProcess, ServiceProcess]
) -> None:
    """SIGKILL and restart of the verifier: prefilled again, same tokens, its segments removed."""
    verifier, drafter = services
    prompts = make_prompts(6, seed=3)
    before = shared_memory_segments()

    def kill() -> None:
        # Before it is killed: afterwards any verifier that starts removes them.
        assert shared_memory_segments() - before, "it has no segment when it is killed"
        verifier.kill()

    async with client_of(verifier.address, drafter.address) as client:
        expected, _ = await outputs(client, prompts, ["none"])
        output, failures = await outputs(client, prompts, drafters, kill, verifier.start)
        assert output == expected
        assert failures
    expect_integrity(verifier)
    assert shared_memory_segments() <= before
