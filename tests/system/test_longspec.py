"""The longspec drafter reads the verifier's KV from its own process and changes no token."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from system_support import EAGER, FAMILIES, THREADS, make_prompts

from paceline.client import Client, GenerationResult
from paceline.drafter.methods.longspec import (
    LongSpecConfig,
    LongSpecModel,
    TargetRef,
    save_longspec,
)
from paceline.harness import ServiceProcess

TOKENS = 48
POSITION_BYTES = {"auto": 256, "int8": 80}
"""Two heads of 16 numbers, keys and values, by the way they are sent."""


def make_layer(target: Path, folder: Path) -> Path:
    """A random layer for a target: its guesses are poor, its way to them is the real one."""
    torch.manual_seed(0)
    config = LongSpecConfig.for_target(target, window=24)
    weights = LongSpecModel(config).state_dict()
    save_longspec(folder, config, weights, TargetRef.of(target), dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def layers(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A layer for each family's target."""
    root = tmp_path_factory.mktemp("layers")
    return {family: make_layer(models[family], root / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def drafter(models: dict[str, Path], layers: dict[str, Path]) -> Iterator[ServiceProcess]:
    """Layers of every family, and such that are sent copies of 40 positions."""
    loads = [
        f"--load={family}=longspec:{layers[family]},target={models[family]},context=20"
        for family in FAMILIES
    ]
    follows = f"longspec:{layers['llama']},target={models['llama']},kv=follow,context=40"
    loads += [f"--load={wire}={follows},kv_wire={wire}" for wire in POSITION_BYTES]
    with ServiceProcess("drafter", loads, environment=THREADS) as process:
        yield process


async def generate(
    client: Client, name: str, prompt: list[int], seed: int, temperature: float = 1.0
) -> GenerationResult:
    return await client.generate(
        prompt,
        max_new_tokens=TOKENS,
        temperature=temperature,
        seed=seed,
        drafter=name,
        ignore_eos=True,
    )


@pytest.mark.parametrize("family", FAMILIES)
async def test_tokens_are_those_of_no_drafter(
    family: str, verifiers: Callable[[str], ServiceProcess], drafter: ServiceProcess
) -> None:
    """6 texts at once, greedy and sampled; what the layer sees is shorter than the texts."""
    prompts = make_prompts(6, seed=3)
    served = await asyncio.to_thread(verifiers, family)
    async with Client(served.address, drafter=drafter.address, drafting=EAGER) as client:

        async def all_at_once(name: str, temperature: float) -> list[GenerationResult]:
            runs = (
                generate(client, name, prompt, seed, temperature)
                for seed, prompt in enumerate(prompts)
            )
            return await asyncio.gather(*runs)

        for temperature in (0.0, 1.0):
            plain = await all_at_once("none", temperature)
            drafted = await all_at_once(family, temperature)
            assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
            assert all(r.stats.drafted for r in drafted), "the layer was never asked"
            assert not any(r.stats.fallbacks for r in drafted)


@pytest.mark.slow
async def test_it_follows_the_kv_where_it_is_told_to(
    models: dict[str, Path], drafter: ServiceProcess, sockets: Path
) -> None:
    """Copies of 40 positions over gRPC, refreshed each round, through the death of a verifier."""
    prompts = [prompt * 8 for prompt in make_prompts(4, seed=9)]
    with ServiceProcess(
        "verifier",
        ["--target", str(models["llama"])],
        address=f"unix:{sockets}/follow",
        environment=THREADS,
    ) as served:
        async with Client(
            served.address, drafter=drafter.address, drafting=EAGER, unread_chunks=2
        ) as client:
            plain = [
                (await generate(client, "none", prompt, seed)).token_ids
                for seed, prompt in enumerate(prompts)
            ]
            for wire, position in POSITION_BYTES.items():
                drafted = await asyncio.gather(
                    *(generate(client, wire, prompt, seed) for seed, prompt in enumerate(prompts))
                )
                assert [r.token_ids for r in drafted] == plain
                for result in drafted:
                    rounds = [r for r in result.stats.rounds if r.drafted]
                    whole, sent = 40 * position, sum(r.kv_bytes for r in rounds)
                    assert whole <= sent < whole * len(rounds) / 4, "only what changed"
            generation = client.generate(
                prompts[0],
                max_new_tokens=TOKENS,
                temperature=1.0,
                seed=0,
                drafter="auto",
                ignore_eos=True,
            )
            pid, read = served.pid, 0
            async for chunk in generation:
                read += len(chunk.token_ids)
                if read >= TOKENS // 4 and served.pid == pid:
                    # The text rests meanwhile: its reader does not read on.
                    await asyncio.to_thread(served.kill)
                    await asyncio.to_thread(served.start)
            result = await generation
            assert result.token_ids == plain[0]
            assert result.stats.fallbacks["verifier_restarted"] == 1
            assert (await generate(client, "auto", prompts[1], 1)).token_ids == plain[1]
