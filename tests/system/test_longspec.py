"""The longspec drafter reads the verifier's KV from its own process and changes no token."""

import asyncio
from pathlib import Path

import pytest
import torch
from system_support import FAMILIES, make_prompts

from paceline.cli.processes import ServiceProcess
from paceline.client import Client, GenerationResult
from paceline.longspec import LongSpecConfig, LongSpecModel, TargetRef, save_longspec

TOKENS = 64


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
    """12 texts at once, greedy and sampled; the layer's window is shorter than the texts."""
    target = models[family]
    layer = make_layer(target, tmp_path / "layer")
    prompts = make_prompts(12, seed=3)
    threads = {"OMP_NUM_THREADS": "1"}
    load = f"longspec=longspec:{layer},target={target}"
    with (
        ServiceProcess("verifier", ["--target", str(target)], environment=threads) as served,
        ServiceProcess("drafter", ["--load", load], environment=threads) as drafter,
    ):
        async with Client(served.address, drafter=drafter.address) as client:

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
