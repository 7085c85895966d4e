"""Several real verifiers: one dies, one drains, one is added, and no text changes."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from system_support import EAGER, THREADS, generate_and, make_prompts

from paceline.client import Client, RetryOptions
from paceline.harness import ServiceProcess

TOKENS = 256


@pytest.fixture(scope="module")
def verifiers(models: dict[str, Path]) -> Iterator[list[ServiceProcess]]:
    """Two verifiers of one target, which run again after each test."""
    arguments = ["--target", str(models["llama"]), "--weights", "float32", "--schedule", "off"]
    with ExitStack() as stack:
        processes = [ServiceProcess("verifier", arguments, environment=THREADS) for _ in range(2)]
        for process in processes:
            process.spawn()
        for process in processes:
            stack.callback(process.stop)
            process.wait_ready()
        yield processes


@pytest.fixture(scope="module")
def mapping(models: dict[str, Path]) -> Iterator[ServiceProcess]:
    """A drafter that reads the KV of the verifier in use."""
    load = f"--load=selfspec=selfspec:{models['llama']},context=24,kv=map"
    with ServiceProcess("drafter", [load], environment=THREADS) as process:
        yield process


def addresses(verifiers: list[ServiceProcess]) -> str:
    return ",".join(verifier.address for verifier in verifiers)


def holder(verifiers: list[ServiceProcess], client: Client) -> ServiceProcess:
    """The verifier with the only running generation."""
    (used,) = [status.address for status in client.verifiers() if status.running]
    return next(verifier for verifier in verifiers if verifier.address == used)


async def test_a_text_survives_the_death_of_its_verifier(
    verifiers: list[ServiceProcess], mapping: ServiceProcess
) -> None:
    """Killed in the middle of the text. A drafter maps the KV before and after."""
    (prompt,) = make_prompts(1, seed=11)
    async with Client(
        addresses(verifiers), drafter=mapping.address, drafting=EAGER, unread_chunks=2
    ) as client:
        expected = await generate_and(client, prompt, "none", TOKENS)
        dead: list[ServiceProcess] = []

        def kill() -> None:
            dead.append(holder(verifiers, client))
            dead[0].kill()

        result = await generate_and(client, prompt, "selfspec", TOKENS, kill)
        assert result.token_ids == expected.token_ids
        stats = result.stats
        assert stats.fallbacks["verifier_moved"] == 1
        assert stats.same_numerics
        assert [stats.verifiers[0], *stats.verifiers[1:]] == [
            dead[0].address,
            *(v.address for v in verifiers if v is not dead[0]),
        ]
        moved_at = len(stats.rounds) // 2
        assert any(entry.drafted for entry in stats.rounds[moved_at:])
        dead[0].start()


async def test_a_gateway_with_two_verifiers(verifiers: list[ServiceProcess]) -> None:
    """One drains while 8 texts stream, is gone, and comes back."""
    services = ["--verifier-address", addresses(verifiers), "--drafter-address", ""]
    prompts = make_prompts(8, seed=12)
    async with Client(verifiers[0].address, retry=RetryOptions(budget=60)) as direct:
        expected = [
            (await direct.generate(prompt, max_new_tokens=64, ignore_eos=True)).text
            for prompt in prompts
        ]
    with ServiceProcess("gateway", services, environment=THREADS) as gateway:
        url = f"http://{gateway.address}/v1"
        async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as api:
            model = (await api.models.list()).data[0].id

            async def write(prompt: list[int]) -> str:
                answer = await api.completions.create(
                    model=model, prompt=prompt, max_tokens=64, extra_body={"ignore_eos": True}
                )
                return answer.choices[0].text

            for act in (verifiers[0].terminate, verifiers[0].start, verifiers[1].kill):
                texts = asyncio.gather(*(write(prompt) for prompt in prompts))
                await asyncio.to_thread(act)
                assert await texts == expected
    verifiers[1].start()
