"""The longspec drafter reads the verifier's KV from its own process and changes no token."""

import asyncio
from pathlib import Path

import pytest
import torch
from system_support import EAGER, FAMILIES, make_prompts

from paceline.cli.processes import ServiceProcess
from paceline.client import Client, DraftOptions, GenerationResult
from paceline.longspec import LongSpecConfig, LongSpecModel, TargetRef, save_longspec

TOKENS = 64
THREADS = {"OMP_NUM_THREADS": "1"}


def make_layer(target: Path, folder: Path) -> Path:
    """A random layer for a target: its guesses are poor, its way to them is the real one."""
    torch.manual_seed(0)
    config = LongSpecConfig.for_target(target, window=24)
    weights = LongSpecModel(config).state_dict()
    save_longspec(folder, config, weights, TargetRef.of(target), dtype=torch.float32)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
async def test_tokens_are_those_of_no_drafter(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """12 texts at once, greedy and sampled; what the layer sees is shorter than the texts."""
    target = models[family]
    layer = make_layer(target, tmp_path / "layer")
    prompts = make_prompts(12, seed=3)
    load = f"longspec=longspec:{layer},target={target},context=20"
    with (
        ServiceProcess("verifier", ["--target", str(target)], environment=THREADS) as served,
        ServiceProcess("drafter", ["--load", load], environment=THREADS) as drafter,
    ):
        async with Client(served.address, drafter=drafter.address, drafting=EAGER) as client:

            async def generate(name: str, temperature: float) -> list[GenerationResult]:
                runs = (
                    client.generate(
                        prompt,
                        max_new_tokens=TOKENS,
                        temperature=temperature,
                        seed=seed,
                        drafter=name,
                        ignore_eos=True,
                    )
                    for seed, prompt in enumerate(prompts)
                )
                return await asyncio.gather(*runs)

            for temperature in (0.0, 1.0):
                plain = await generate("none", temperature)
                drafted = await generate("longspec", temperature)
                assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
                assert any(r.stats.drafted for r in drafted), "the layer was never asked"
                reasons = {reason for r in drafted for reason in r.stats.fallbacks}
                assert reasons <= {"drafter_timeout"}  # a busy machine may make it late


@pytest.mark.parametrize("wire", ["auto", "int8"])
async def test_it_follows_the_kv_where_it_is_told_to(
    wire: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """Copies of 40 positions over gRPC, refreshed each round, through the death of a verifier."""
    target = models["llama"]
    layer = make_layer(target, tmp_path / "layer")
    prompts = [prompt * 8 for prompt in make_prompts(4, seed=9)]
    load = f"longspec=longspec:{layer},target={target},kv=follow,kv_wire={wire},context=40"
    options = DraftOptions(timeout=2.0, first_delay=0.01, longest_delay=0.05, adaptive=False)
    with (
        ServiceProcess("verifier", ["--target", str(target)], environment=THREADS) as served,
        ServiceProcess("drafter", ["--load", load], environment=THREADS) as drafter,
    ):
        async with Client(served.address, drafter=drafter.address, drafting=options) as client:

            async def generate(name: str, prompt: list[int], seed: int) -> GenerationResult:
                return await client.generate(
                    prompt,
                    max_new_tokens=TOKENS,
                    temperature=1.0,
                    seed=seed,
                    drafter=name,
                    ignore_eos=True,
                )

            plain = [await generate("none", prompt, seed) for seed, prompt in enumerate(prompts)]
            drafted = await asyncio.gather(
                *(generate("longspec", prompt, seed) for seed, prompt in enumerate(prompts))
            )
            assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
            # Two heads of 16 numbers, keys and values; per round a few positions and their frame.
            position = {"auto": 256, "int8": 80}[wire]
            for result in drafted:
                rounds = [r for r in result.stats.rounds if r.drafted]
                first = sum(r.kv_bytes for r in rounds[:1])
                assert 40 * position <= sum(r.kv_bytes for r in rounds)
                assert all(r.kv_bytes < first for r in rounds[3:]), "only what changed"
            running = asyncio.create_task(generate("longspec", prompts[0], 0))
            await asyncio.sleep(0.05)
            served.kill()
            served.restart_same_address()
            assert (await running).token_ids == plain[0].token_ids
            assert (await generate("longspec", prompts[1], 1)).token_ids == plain[1].token_ids
