"""Several real verifiers: one dies, one drains, and no text changes."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from system_support import EAGER, THREADS, generate_and, make_prompts

from paceline.client import Client
from paceline.harness import ServiceProcess

TOKENS = 256


@pytest.fixture(scope="module")
def verifiers(models: dict[str, Path], sockets: Path) -> Iterator[list[ServiceProcess]]:
    """Three verifiers of one target. Each test ends one of them."""
    arguments = ["--target", str(models["llama"]), "--weights", "float32", "--schedule", "off"]
    with ExitStack() as stack:
        processes = [
            ServiceProcess(
                "verifier", arguments, address=f"unix:{sockets}/{number}", environment=THREADS
            )
            for number in range(3)
        ]
        for process in processes:
            process.spawn()
        for process in processes:
            stack.callback(process.stop)
            process.wait_ready()
        yield processes


def addresses(verifiers: list[ServiceProcess]) -> str:
    return ",".join(verifier.address for verifier in verifiers)


def holder(verifiers: list[ServiceProcess], client: Client) -> ServiceProcess:
    """The verifier with the only running generation."""
    (used,) = [status.address for status in client.verifiers() if status.running]
    return next(verifier for verifier in verifiers if verifier.address == used)


async def test_a_text_survives_the_death_of_its_verifier(
    models: dict[str, Path], verifiers: list[ServiceProcess]
) -> None:
    """Killed in the middle of the text. A drafter maps the KV before and after."""
    (prompt,) = make_prompts(1, seed=11)
    load = f"--load=selfspec=selfspec:{models['llama']},context=24,kv=map"
    joins = (f"--verifier={verifier.address}" for verifier in verifiers)
    async with (
        ServiceProcess("drafter", [load, *joins], environment=THREADS),
        Client(addresses(verifiers), drafting=EAGER, unread_chunks=2) as client,
    ):
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
        assert len(stats.verifiers) == 2
        assert stats.verifiers[0] == dead[0].address
        moved_at = len(stats.rounds) // 2
        assert any(entry.drafted for entry in stats.rounds[moved_at:])
    await asyncio.to_thread(dead[0].start)  # which removes the segments that it left


async def test_a_gateway_with_several_verifiers(verifiers: list[ServiceProcess]) -> None:
    """One of them drains while 8 texts are written."""
    services = ["--verifier-address", addresses(verifiers)]
    prompts = make_prompts(8, seed=12)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3}

    async def write(api: AsyncOpenAI, prompt: list[int]) -> str:
        more = {"ignore_eos": True}
        answer = await api.completions.create(
            model="llama", prompt=prompt, max_tokens=64, extra_body=more, **options
        )
        return answer.choices[0].text

    drained, kept = [each for each in verifiers if each.returncode is None][:2]
    async with Client(kept.address) as direct:
        results = await asyncio.gather(
            *(
                direct.generate(prompt, max_new_tokens=64, ignore_eos=True, **options)
                for prompt in prompts
            )
        )
    with ServiceProcess("gateway", services, environment=THREADS) as gateway:
        url = f"http://{gateway.address}/v1"
        async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as api:
            for end in (lambda: None, drained.terminate):
                texts = asyncio.gather(*(write(api, prompt) for prompt in prompts))
                await asyncio.to_thread(end)
                assert await texts == [result.text for result in results]
    assert drained.returncode == 0
