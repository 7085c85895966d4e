"""The dspark drafter gets hidden states by shared memory or the wire, and changes no token."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from system_support import EAGER, FAMILIES, THREADS, make_prompts

from paceline.client import Client, GenerationResult
from paceline.drafter.methods.dspark import DSparkConfig, DSparkModel, save_dspark
from paceline.drafter.methods.target import TargetRef
from paceline.harness import ServiceProcess

TOKENS = 48


def make_drafter(target: Path, folder: Path) -> Path:
    """A random drafter for a target: its guesses are poor, its way to them is the real one."""
    torch.manual_seed(0)
    config = DSparkConfig.for_target(
        target, taps=(0, 1), block=4, mask_token=2, window=24, markov_rank=8
    )
    weights = DSparkModel(config).state_dict()
    save_dspark(folder, config, weights, TargetRef.of(target), dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def drafter(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    """Of every family: a tree, a chain, and a tree from sent states."""
    loads = []
    for family in FAMILIES:
        target = models[family]
        folder = make_drafter(target, tmp_path_factory.mktemp(family) / "drafter")
        for name, option in (("tree", ""), ("chain", ",widths=1"), ("far", ",states=follow")):
            loads.append(f"--load={family}-{name}=dspark:{folder},target={target}{option}")
    with ServiceProcess("drafter", loads, environment=THREADS) as process:
        yield process


@pytest.mark.parametrize("family", FAMILIES)
async def test_tokens_are_those_of_no_drafter(
    family: str, verifiers: Callable[[str], ServiceProcess], drafter: ServiceProcess
) -> None:
    """6 texts at once, greedy and sampled."""
    prompts = make_prompts(6, seed=3)
    served = await asyncio.to_thread(verifiers, family)
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

        for temperature, names in ((0.0, ("tree", "far")), (1.0, ("chain", "far"))):
            plain = await generate("none", temperature)
            for name in names:
                drafted = await generate(f"{family}-{name}", temperature)
                assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
                assert all(r.stats.drafted for r in drafted), "the drafter was never asked"
                received = sum(e.kv_bytes for r in drafted for e in r.stats.rounds)
                assert (received > 0) == (name == "far")
                assert not any(r.stats.fallbacks for r in drafted)
